"""`tpu-train recipe=smoke` answers whether everything works on a machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_the_smoke_recipe_trains_and_validates(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpu_train.cli", "recipe=smoke", "run_dir=run", "logging.wandb.mode=disabled"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    *steps, last = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert last["validation_loss"] < steps[0]["loss"] - 1
    assert (tmp_path / "run/checkpoints/10/files.json").is_file()
