"""A run that breaks: the traceback goes to log.txt, the screen gets one line. Others' warnings are logged."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_train_command import TINY
from tpu_train.config.compose import compose
from tpu_train.training.engine import Engine
from tpu_train.training.failures import RunFailed
from tpu_train.training.trainer import train

CRASH = """
import sys
from tpu_train.config.compose import compose
from tpu_train.training.engine import Engine
from tpu_train.training.failures import RunFailed
from tpu_train.training.trainer import train

def broken(*_):
    raise RuntimeError("the device is gone\\nand more")

Engine.step = broken
try:
    train(compose(sys.argv[1:]))
except RunFailed as failed:
    print(f"failed: {failed}", file=sys.stderr)
    sys.exit(1)
"""


def test_a_traceback_goes_to_the_log_and_not_to_the_screen(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CRASH, *TINY, "training.steps=2", "run_dir=run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    line = "failed: RuntimeError: the device is gone (traceback in run/log.txt)"
    assert done.stderr.splitlines()[-1] == line
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("Traceback (most recent call last)") == 1
    assert "RuntimeError: the device is gone" in log
    assert "ERROR tpu_train.training" in log


def test_the_error_is_chained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError()

    def broken(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Engine, "step", broken)
    with pytest.raises(RunFailed, match="ValueError: no message") as caught:
        train(compose([*TINY, f"run_dir={tmp_path / 'run'}"]))
    assert caught.value.__cause__ is error
    assert caught.value.reason == "ValueError: no message"
    assert caught.value.log_path == tmp_path / "run" / "log.txt"


def test_an_interrupt_is_one_line_and_a_warning_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = Engine.step, []

    def interrupted(self: Engine, *arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 1:
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                warnings.warn("from another\nlibrary", UserWarning, stacklevel=1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(self, *arguments)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(compose([*TINY, f"run_dir={tmp_path / 'run'}"]))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "WARNING tpu_train.training.trainer: interrupted at step 2\n" in log
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if "from another library" in line]
    assert "WARNING py.warnings" in line
    assert "UserWarning" in line
