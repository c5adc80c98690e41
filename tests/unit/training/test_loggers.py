"""Loggers joined: who gets which record, and that none but the file can stop a run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_train_command import TINY
from tpu_train.config.compose import compose
from tpu_train.training.loggers import Logger, Loggers
from tpu_train.training.metrics import MetricsFile
from tpu_train.training.rules import rules
from tpu_train.training.tensorboard_logger import TensorBoardLogger


class Kept:
    name = "kept"

    def __init__(self, fails_at: int = 0, fails_closing: bool = False) -> None:
        self.records: list[dict[str, Any]] = []
        self.exit_code: int | None = None
        self._fails_at, self._fails_closing = fails_at, fails_closing

    def log(self, record: dict[str, Any]) -> None:
        if record["step"] == self._fails_at:
            raise OSError("disk full")
        self.records.append(record)

    def close(self, exit_code: int) -> None:
        if self._fails_closing:
            raise OSError("gone")
        self.exit_code = exit_code


def run_loggers(folder: Path, *loggers: Logger) -> list[int]:
    others = [(logger.name, lambda logger=logger: logger) for logger in loggers]
    joined = Loggers(MetricsFile(folder / "metrics.jsonl"), others, log_every=3, steps=7)
    for step in range(1, 8):
        joined.write({"step": step, "loss": 1.0})
    joined.write({"step": 7, "validation_loss": 2.0})
    joined.close(0)
    assert joined.last_step == 7
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_file_gets_every_record_and_others_some(tmp_path: Path) -> None:
    kept = Kept()
    assert run_loggers(tmp_path, kept) == [1, 2, 3, 4, 5, 6, 7, 7]
    assert [record["step"] for record in kept.records] == [1, 3, 6, 7, 7]
    assert kept.exit_code == 0


def test_a_logger_that_fails_is_reported_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing, kept, last = Kept(fails_at=3), Kept(), Kept(fails_closing=True)
    assert run_loggers(tmp_path, failing, kept, last) == [1, 2, 3, 4, 5, 6, 7, 7]
    assert [record["step"] for record in failing.records] == [1]
    assert [record["step"] for record in kept.records] == [1, 3, 6, 7, 7]
    assert caplog.messages == [
        "kept is off from step 3 on: OSError: disk full",
        "kept did not finish: OSError: gone",
    ]


def test_a_logger_that_cannot_be_made_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Logger:
        raise OSError("read-only")

    loggers = Loggers(MetricsFile(tmp_path / "metrics.jsonl"), [("x", refuse)], log_every=1, steps=1)
    loggers.write({"step": 1})
    loggers.close(0)
    assert caplog.messages == ["x is off: OSError: read-only"]


def test_tensorboard_has_the_numbers_and_the_configuration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, {"training": {"seed": 3}, "metadata": {"ticket": "T-1"}})
    for step in (1, 2):
        logger.log({"step": step, "loss": 3.0 / step, "mfu": 0.5, "peak_memory_source": "x", "aux": 1.5})
    logger.log({"step": 2, "validation_loss": 2.25})
    logger.close(0)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["speed/mfu", "train/aux", "train/loss", "validation/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 3.0), (2, 1.5)]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "seed: 3" in text
    assert "ticket: T-1" in text


def test_a_run_with_tensorboard_writes_its_folder(tmp_path: Path) -> None:
    words = [*TINY, "training.steps=2", "logging.tensorboard.enabled=true", "run_dir=run"]
    command = [sys.executable, "-m", "tpu_train.cli", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


def test_tensorboard_is_imported_only_when_enabled() -> None:
    code = "import sys, tpu_train.training.loggers; sys.exit(bool({'tensorboard', 'wandb'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_tensorboard_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    enabled = compose([*TINY, "logging.tensorboard.enabled=true"]).run
    assert rules(enabled) == []
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else find(name))
    (problem,) = rules(enabled)
    assert problem.place == "logging.tensorboard.enabled"
    assert "pip install 'tpu-train[tensorboard]'" in problem.message
    assert rules(compose(TINY).run) == []
