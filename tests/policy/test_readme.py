"""What the README shows is true: its commands are accepted, and the fields and folders that it names exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.training.test_train_command import CONTRACT_FIELDS
from tpu_train.checking import check
from tpu_train.config.compose import compose
from tpu_train.sweeps.plan import plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
PARALLELISM = (ROOT / "docs/parallelism.md").read_text()
KERNELS = (ROOT / "docs/kernels.md").read_text()


def commands_of(text: str) -> list[str]:
    lines = [line.split(" #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    return [
        line for line in lines if line and Path(line.split()[0]).name in ("tpu-train", "train", "test", "bench_step")
    ]


COMMANDS = commands_of(README)


def test_it_opens_with_the_two_commands() -> None:
    assert COMMANDS[:2] == ["scripts/train", "scripts/test"]


@pytest.mark.parametrize(
    "command", [*COMMANDS, *commands_of(CONFIGURATION), *commands_of(PARALLELISM), *commands_of(KERNELS)]
)
def test_commands_are_accepted(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(command)
    name = Path(program).name
    if name != "tpu-train":
        assert (ROOT / program).is_file()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"text": "hello"}\n')
    if name == "tpu-train":
        command_line = [sys.executable, "-m", "tpu_train.cli", *words]
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    else:  # training is run by the tests of training
        sweep = "-m" in words
        composed = plan([word for word in words if word != "-m"], None).composed if sweep else compose(words)
        assert not check(composed.run, composed.sources)


def test_it_names_every_field_of_a_metrics_line() -> None:
    assert set(re.findall(r"`(\w+)`", README)) >= CONTRACT_FIELDS


def test_the_folders_it_names_exist() -> None:
    section = README.split("## How it is built")[1]
    folders = set(re.findall(r"`(\w+)`", section.split("`docs/`")[0]))
    assert folders == {path.parent.name for path in (ROOT / "tpu_train").glob("*/__init__.py")}


def test_no_host_of_a_registry_and_no_path_of_a_machine_is_named() -> None:
    suffixes = {".py", ".md", ".yaml", ".toml", ""}
    paths = [p for folder in ("tpu_train", "conf", "scripts", "docs", "tests") for p in (ROOT / folder).rglob("*")]
    words = ("pypi" + ".org", "download.py" + "torch", "/home" + "/", "/ro" + "ot/")
    for path in [*paths, ROOT / "README.md", ROOT / "pyproject.toml"]:
        if path.is_file() and path.suffix in suffixes:
            text = path.read_text(errors="replace")
            assert not [word for word in words if word in text], path
