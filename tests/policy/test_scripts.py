"""scripts/train and scripts/test: what they install, when, and what happens when that is interrupted."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Stands for Python: makes "environments", and logs what it would install. `fail` in the folder makes pip fail.
FAKE_PYTHON = """#!/usr/bin/env bash
root="{root}"
case "$*" in
    "-c import sys, venv"*) exit 0 ;;
    "-m venv --clear "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"
        printf '#!/bin/sh\\necho "trained: $*"\\n' > "$4/bin/tpu-train"; chmod +x "$4/bin/tpu-train" ;;
    "-VV") echo "Python 3.11" ;;
    "-m pip --version") [ -d "$(dirname "$0")" ] ;;
    "-m pip install -e "*) [ ! -e "$root/fail" ] && echo "$5" >> "$root/installs" ;;
    *) echo "unexpected: $*" >&2; exit 9 ;;
esac
"""

# All that the scripts may use besides Python; the machine's own Pythons stay out of reach.
TOOLS = ("bash", "env", "sh", "cat", "chmod", "cksum", "cp", "dirname", "mkdir", "rm")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    root = tmp_path / "a project"
    (root / "scripts").mkdir(parents=True)
    for name in ("_environment", "train"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts" / name)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, root / name)
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found
        (tmp_path / "bin" / tool).symlink_to(found)
    python = tmp_path / "bin" / "python3.11"
    python.write_text(FAKE_PYTHON.format(root=root))
    python.chmod(0o755)
    return root


def run_train(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(project.parent / "bin"), "HOME": str(project)}
    command = [str(project / "scripts" / "train"), *words]
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=60, check=False)


def num_installs(project: Path) -> int:
    path = project / "installs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_the_first_call_installs_and_passes_the_words_on(project: Path) -> None:
    done = run_train(project, "model=qwen3_debug", "data.path=a b")
    assert done.stdout == "trained: model=qwen3_debug data.path=a b\n", done.stderr
    assert num_installs(project) == 1


def test_the_second_call_installs_nothing_and_a_changed_pyproject_renews(project: Path) -> None:
    run_train(project)
    run_train(project)
    assert num_installs(project) == 1
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    run_train(project)
    assert num_installs(project) == 2


def test_an_interrupted_installation_is_done_again(project: Path) -> None:
    (project / "fail").touch()
    assert run_train(project).returncode != 0
    (project / "fail").unlink()
    done = run_train(project)
    assert done.returncode == 0, done.stderr
    assert num_installs(project) == 1


def test_without_python_3_11_it_says_what_is_needed(project: Path) -> None:
    (project.parent / "bin" / "python3.11").unlink()
    done = run_train(project)
    assert done.returncode != 0
    assert "Python 3.11 with its venv module is needed" in done.stderr


@pytest.mark.parametrize("name", ["train", "test", "bench_step"])
def test_scripts_are_executable_and_strict(name: str) -> None:
    path = ROOT / "scripts" / name
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
