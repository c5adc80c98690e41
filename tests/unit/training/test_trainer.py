"""The loop's order of work: the host is a step ahead of the metrics."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_train_command import TINY
from tpu_train.config.compose import compose
from tpu_train.execution.runtime import Runtime
from tpu_train.training.engine import Engine
from tpu_train.training.trainer import train


def test_a_steps_metrics_are_fetched_after_the_next_step_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    step, fetch = Engine.step, Runtime.fetch

    def recorded_step(self: Engine, *arguments: Any) -> Any:
        events.append("start")
        return step(self, *arguments)

    def recorded_fetch(self: Runtime, tree: Any) -> Any:
        events.append("metrics")
        return fetch(self, tree)

    monkeypatch.setattr(Engine, "step", recorded_step)
    monkeypatch.setattr(Runtime, "fetch", recorded_fetch)
    assert train(compose([*TINY, "training.steps=4", "data.num_workers=0", f"run_dir={tmp_path / 'run'}"])) == 0
    assert events == ["start", "start", "metrics", "start", "metrics", "start", "metrics", "metrics"]
