"""Training with each kind of wandb trouble: exit 0, no wait, no prompt, and the local run has the metrics."""

import datetime
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.training.fake_wandb import KEY, FakeWandb, history, offline_file
from tests.unit.training.test_train_command import TINY

# wandb's own waits are 20 s to start and without end to finish; giving up takes at most 10 s here, and usually 1.
LIMIT_SECONDS = 15
WORDS = [*TINY, "logging.wandb.mode=auto", "training.steps=6", "training.log_every=2", "run_dir=run"]


@pytest.fixture
def resources() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def environment_of(situation: str, resources: ExitStack) -> dict[str, str]:
    match situation:
        case "no key":
            return {}
        case "WANDB_MODE=offline":
            return {"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}
        case "no server":
            return {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": KEY}
        case "a server that never answers":
            server = resources.enter_context(socket.create_server(("127.0.0.1", 0)))
            return {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": KEY}
        case "a server that dies":
            # It answers while the run starts, and goes before the first step.
            fake = resources.enter_context(FakeWandb(dies_after="UpsertBucket"))
            return {"WANDB_BASE_URL": fake.url, "WANDB_API_KEY": KEY}
    raise AssertionError(situation)


@pytest.mark.parametrize(
    "situation",
    ["no key", "WANDB_MODE=offline", "no server", "a server that never answers", "a server that dies"],
)
def test_training_neither_waits_nor_fails_nor_loses_records(
    situation: str, tmp_path: Path, resources: ExitStack
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = {"HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "tpu_train.cli", *WORDS],
        cwd=tmp_path,
        env={**clean, **home, **environment_of(situation, resources)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    run = tmp_path / "run"
    assert ended - (run / "checkpoints" / "6" / "files.json").stat().st_mtime < LIMIT_SECONDS
    assert seconds_between(run / "log.txt", "run folder:", "tokens a step") < LIMIT_SECONDS
    file = offline_file(run)
    rows = history(file)
    assert [row["_step"] for row in rows] == [1, 2, 4, 6]
    assert all(row["loss"] > 0 and row["mfu"] > 0 and row["tokens_per_s"] > 0 for row in rows)
    assert all(row["peak_memory_bytes"] > 0 for row in rows)
    assert f"wandb: offline in {file.parent.relative_to(tmp_path)}" in done.stderr
    assert done.stderr.count("WARNING wandb") == (0 if situation in ("no key", "WANDB_MODE=offline") else 1)


def seconds_between(log: Path, first: str, second: str) -> float:
    """Between two lines of a log."""
    lines = log.read_text().splitlines()
    times = [
        next(datetime.datetime.fromisoformat(line[:23].replace(",", ".")) for line in lines if words in line)
        for words in (first, second)
    ]
    return (times[1] - times[0]).total_seconds()
