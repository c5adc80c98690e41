"""The command line as users meet it: exit codes, what is printed where, and what is not imported."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from tpu_train import cli
from tpu_train.config.compose import Composed
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.training.failures import RunFailed


def tpu_train(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpu_train.cli", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def run_main(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Composed], int]], None]:
    """Puts a function in the trainer's place."""

    def replace(train: Callable[[Composed], int]) -> None:
        monkeypatch.setitem(sys.modules, "tpu_train.training.trainer", types.SimpleNamespace(train=train))

    return replace


def test_start_imports_nothing_heavy() -> None:
    heavy = ["torch", "jax", "hydra", "omegaconf", "wandb", "numpy", "rich", "yaml", "transformers"]
    code = f"import sys, tpu_train.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_help_lists_the_commands(tmp_path: Path) -> None:
    for words in (["--help"], ["-h"]):
        done = tpu_train(*words, cwd=tmp_path)
        assert done.returncode == 0
        assert all(f"  {command} " in done.stdout for command in ("train", "check", "show"))


def test_refusal_prints_every_problem_and_starts_nothing(tmp_path: Path) -> None:
    done = tpu_train("training.stpes=5", "model=qwen", "runtime.devices=x", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        "command line 'training.stpes=5'",
        "command line 'model=qwen'",
        "command line 'runtime.devices=x'",
    ]
    assert list(tmp_path.iterdir()) == []


def test_broken_rule_is_refused_by_every_command_that_would_use_it(tmp_path: Path) -> None:
    for command in ("train", "check"):
        done = tpu_train(command, "training.grad_accumulation=3", "--json", cwd=tmp_path)
        assert done.returncode == 2
        (problem,) = json.loads(done.stdout)["problems"]
        assert problem["place"] == "command line 'training.grad_accumulation=3'"
        assert "does not divide" in problem["message"]
    assert list(tmp_path.iterdir()) == []


def test_check_counts_405_billion_parameters_without_allocating_them(tmp_path: Path) -> None:
    done = tpu_train("check", "model=llama3_405b", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"] == 405_853_388_800
    assert found["model"] == "llama3_405b"
    assert set(found) == {
        "model",
        "parameters",
        "trainable_parameters",
        "flops_per_token",
        "flops_per_token_causal",
        "seq_len",
        "global_batch_size",
        "tokens_per_step",
    }
    assert list(tmp_path.iterdir()) == []


def test_check_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["check", "model=qwen3_8b"]) == 0
    assert "8,190,735,360" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["model=llama3_debug"], ["train", "model=llama3_debug"], ["--config-dir", "."]])
def test_no_command_means_train(words: list[str], trained: Callable[..., None]) -> None:
    seen: list[Composed] = []
    trained(lambda composed: seen.append(composed) or 0)
    assert run_main(words) == 0
    assert seen[0].choices["model"] == ("llama3_debug" if "model=llama3_debug" in words else "qwen3_debug")


def test_exit_code_and_output_of_the_run_are_passed_on(
    trained: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    trained(lambda _: print("log") or 75)
    assert run_main(["train", "--json"]) == 75
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"exit_code": 75}
    assert captured.err == "log\n"


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (RuntimeError("no device\nmore"), 1, "tpu-train: failed: RuntimeError: no device"),
        (KeyError(), 1, "tpu-train: failed: KeyError: no message"),
        (KeyboardInterrupt(), 130, "tpu-train: interrupted"),
        (ConfigError([Problem("data.path", "is empty")]), 2, "data.path: is empty"),
    ],
)
def test_failing_run_ends_with_a_readable_line(
    error: BaseException, code: int, last: str, trained: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(_: Composed) -> int:
        raise error

    trained(train)
    assert run_main([]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == last
    assert ("Traceback" in lines[0]) == (code == 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["trian"],
            "'trian': not a command; nearest is 'train'; commands: train, check, show, generate",
        ),
        (["xyz"], "'xyz': not a command; commands: train, check, show"),
        (["--json", "check"], "'check': a command comes first: tpu-train check ..."),
        (
            ["--steps=5"],
            "command line '--steps=5': there is no option '--steps'; keys are set without dashes: training.st",
        ),
        (["check", "--steps", "5"], "command line '--steps 5': there is no option '--steps'; keys are set without"),
        (["show", "model", "data"], "'data': a second thing to show, beside 'model'"),
        (["show", "optimzer"], "'optimzer': is neither a group nor a key; nearest is 'optimizer'"),
        (["check", "model"], "command line 'model': not an override"),
    ],
)
def test_misused_command_line_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["--json", "--config-dir"], [("command line '--config-dir'", "requires an argument")]),
        (
            ["check", "--json", "--config-dir="],
            [("command line '--config-dir'", "is empty; give a folder of YAML by group")],
        ),
        (["check", "--json=1", "-m=1"], [("'--json=1'", "--json takes no value"), ("'-m=1'", "-m takes no value")]),
        (
            ["check", "--json", "--", "--json"],
            [("command line '--json'", "an option and not an override; write --json before")],
        ),
        (
            ["training.steps", "--json"],
            [("'training.steps'", "set it with training.steps=VALUE; what it means: tpu-train show")],
        ),
        (["model", "--json"], [("'model'", "choose with model=CHOICE; the choices: tpu-train show model")]),
    ],
)
def test_misuse_is_told_in_json_too(
    words: list[str], problems: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(words) == 2
    told = json.loads(capsys.readouterr().out)["problems"]
    for problem, (place, message) in zip(told, problems, strict=True):
        assert place in problem["place"]
        assert message in problem["message"]


def _run(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    program = f"{sys.executable} -m tpu_train.cli"
    command = ["bash", "-c", script.replace("tpu-train", program)]
    return subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, check=False, timeout=120
    )


def test_streams_that_take_nothing_end_in_a_line_and_an_exit_code(tmp_path: Path) -> None:
    full = _run("tpu-train show > /dev/full", tmp_path)
    assert full.returncode == 1
    assert full.stderr == b"tpu-train: failed: cannot write the output: No space left on device\n"
    closed = _run("tpu-train check training.stpes=1 2>&-", tmp_path)
    assert (closed.returncode, closed.stdout) == (2, b"")
    assert _run("tpu-train check training.stpes=1 2> /dev/full", tmp_path).returncode == 2
    gone = _run("tpu-train show | head -1", tmp_path)
    assert (gone.stdout, gone.stderr) == (b"model:\n", b"")


def test_characters_that_a_stream_does_not_have_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe/mine.yaml").write_text("# @package _global_\n# Größe λ.\n", encoding="utf-8")
    shown = _run("tpu-train show recipe --config-dir .", tmp_path, PYTHONIOENCODING="latin-1")
    assert shown.returncode == 0, shown.stderr
    assert "Größe \\u03bb.".encode("latin-1") in shown.stdout


def test_interrupt_at_any_time_ends_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("_with_command", "_checked"):  # before typer has it, and inside of a command
        with monkeypatch.context() as patched:
            patched.setattr(cli, name, interrupted)
            assert run_main(["check"]) == 130
        assert capsys.readouterr().err == "tpu-train: interrupted\n"


def test_a_run_that_failed_after_it_began_points_to_its_log(
    trained: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def train(_: Composed) -> int:
        raise RunFailed(RuntimeError("no device\nmore"), Path("runs/r/log.txt"))

    trained(train)
    assert run_main(["hydra.job.env_set={TPU_TRAIN_TEST_MARK: x}"]) == 1
    assert capsys.readouterr().err == ("tpu-train: failed: RuntimeError: no device (traceback in runs/r/log.txt)\n")
    assert os.environ.pop("TPU_TRAIN_TEST_MARK") == "x"


def test_show_prints_text_or_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(["show"]) == 0
    assert "steps: 300" in capsys.readouterr().out
    assert run_main(["show", "--json", "training.steps", "training.steps=4"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 4
    assert run_main(["show", "optimizer"]) == 0
    assert "SGD with momentum." in capsys.readouterr().out
