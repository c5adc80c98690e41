"""TAB in the shells: bash itself runs its script; zsh and fish are asked as their scripts ask."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpu_train import cli
from tpu_train.config import shells

# Calls the function as bash does, with the words as bash breaks them.
CALL = """
compopt() { printf 'compopt %s %s\\n' "$@"; }
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_tpu_train_completion "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Has `tpu-train` on its PATH, from any folder."""
    program = tmp_path / "bin/tpu-train"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tpu_train.cli "$@"\n')
    program.chmod(0o755)
    package = str(Path(cli.__file__).parents[1])
    return {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": package}


@pytest.mark.parametrize(
    ("words", "reply"),
    [
        (["mod"], ["mode=", "model="]),
        (["training.st"], ["compopt -o nospace", "training.steps="]),
        (["training.on_nan", "="], ["stop", "skip"]),
        (["training.on_nan", "=", "st"], ["stop"]),
        (["training.on_nan=st"], ["training.on_nan=stop"]),  # with COMP_WORDBREAKS without =
        (["training.on_nan="], ["training.on_nan=stop", "training.on_nan=skip"]),
        (["model", "=", "qwen3_debug", "mod"], ["compopt -o nospace", "mode="]),
        (["run_dir", "=", "a", ":", "b", "precision", "=", "fp"], ["fp32"]),
        (["run_dir", "=", "'a b'", "precision", "=", "fp"], ["fp32"]),
        (["show", "validation.s"], ["validation.steps"]),
        (["check", "--js"], ["--json"]),
        (["data.path", "=", "/t"], [""]),  # none: bash completes the path
    ],
)
def test_bash(words: list[str], reply: list[str], environment: dict[str, str]) -> None:
    script = shells.SCRIPTS["bash"] + CALL
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", "tpu-train", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == reply


def test_bash_at_a_terminal(environment: dict[str, str], tmp_path: Path) -> None:
    """Keys are pressed and the line is read back: what is replaced, and where a space follows."""
    (tmp_path / "script").write_text(shells.SCRIPTS["bash"])
    ours, theirs = pty.openpty()
    bash = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        cwd=tmp_path,
        env={**environment, "TERM": "dumb", "INPUTRC": os.devnull},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    try:
        # A function shows the words instead of running them; the completion itself finds the program.
        os.write(ours, b"source ./script; tpu-train() { printf '<%s>' \"$@\"; }\r")
        os.write(ours, b"tpu-train model=qwen3_de\ttraining.st\t5 training.on_nan=sk\tscr\t\r")
        assert "<model=qwen3_debug><training.steps=5><training.on_nan=skip><script>" in read_until(ours, "ipt>")
    finally:
        bash.kill()
        bash.wait()
        os.close(ours)
        os.close(theirs)


def read_until(terminal: int, text: str) -> str:
    found, end = "", time.monotonic() + 60
    while text not in found and time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            found += os.read(terminal, 65536).decode(errors="replace")
    return found


def asked(
    shell: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    monkeypatch.setenv("_TPU_TRAIN_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("COMP_WORDS", "\n".join(["tpu-train", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert not ended.value.code
    return capsys.readouterr().out.splitlines()


def test_zsh_is_told_what_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def zsh(*words: str) -> list[str]:
        return asked("zsh", list(words), monkeypatch, capsys)

    assert zsh("mod") == ["+mode=:How PyTorch code becomes XLA programs.", "+model=:The model."]
    assert zsh("model=qwen3_8") == ["-model=qwen3_8b:Qwen3 8B."]
    assert zsh("training.on_nan=") == ["-training.on_nan=stop", "-training.on_nan=skip"]
    assert zsh("data.path=/t") == []


def test_fish_is_told_help_after_a_tab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fish(*words: str) -> list[str]:
        return asked("fish", list(words), monkeypatch, capsys)

    assert fish("train", "mod") == ["mode=\tHow PyTorch code becomes XLA programs.", "model=\tThe model."]
    assert fish("training.on_nan=s") == ["training.on_nan=stop", "training.on_nan=skip"]
    assert fish("--show-completion", "z") == ["zsh"]
    assert [line.split("\t")[0] for line in fish("chec")] == ["check", "checkpoint="]
    assert {"-h", "--help", "--config-dir", "--json"} <= {line.split("\t")[0] for line in fish("-")}


def test_users_folder_is_found_behind_quotes_and_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "my conf/recipe").mkdir(parents=True)
    (tmp_path / "my conf/recipe/mine.yaml").write_text("# Mine.\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("'~/my conf'", "~/my\\ conf", '"$HOME/my conf"'):
        assert asked("zsh", ["--config-dir", folder, "recipe=m"], monkeypatch, capsys) == ["-recipe=mine:Mine."]
    assert asked("fish", ["--config-dir", f"{tmp_path}/my conf", "recipe=m"], monkeypatch, capsys) == [
        "recipe=mine\tMine."
    ]
    assert asked("zsh", ["run_dir='open", "recipe=s"], monkeypatch, capsys)[0].startswith("-recipe=smoke:")


def test_an_answer_imports_nothing_heavy(environment: dict[str, str]) -> None:
    heavy = ["torch", "jax", "hydra", "omegaconf", "wandb", "numpy", "rich", "transformers"]
    code = f"""
import sys, tpu_train.cli
try: tpu_train.cli.main()
except SystemExit: print([name for name in {heavy} if name in sys.modules])
"""
    asking = {"_TPU_TRAIN_COMPLETE": "complete_fish", "COMP_WORDS": "tpu-train\nmode", "COMP_CWORD": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **asking}, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"
    assert "model=" in found.stdout


def run_main(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    return int(ended.value.code or 0)


def test_script_is_shown_for_a_named_shell_or_the_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for shell, text in shells.SCRIPTS.items():
        monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
        for words in (["--show-completion"], ["--show-completion", shell], [f"--show-completion={shell}"]):
            assert run_main(*words) == 0
            assert capsys.readouterr().out == text
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert run_main("--show-completion") == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shell", "file", "start"),
    [
        ("bash", ".local/share/tpu-train/completion.bash", ".bashrc"),
        ("zsh", ".local/share/tpu-train/completion.zsh", ".zshrc"),
        ("fish", ".config/fish/completions/tpu-train.fish", None),
    ],
)
def test_installed_twice_is_installed_once(
    shell: str, file: str, start: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if start:
        (tmp_path / start).write_text("alias x=y")  # no newline at its end
    for _ in range(2):
        assert run_main("--install-completion", shell) == 0
    assert (tmp_path / file).read_text() == shells.SCRIPTS[shell]
    if start:
        assert (tmp_path / start).read_text() == f"alias x=y\nsource {tmp_path / file}\n"
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == (2 if start else 1)
