"""`tpu-train train` on the real command line: what a run writes, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tpu_train.training.checkpoints import Checkpoints
from tpu_train.training.saved_run import SavedRun

CONTRACT_FIELDS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "tokens",
    "step_time_s",
    "data_wait_s",
    "tokens_per_s",
    "model_tflops_per_s",
    "mfu",
    "mfu_causal",
    "peak_memory_bytes",
    "peak_memory_source",
    "compile_count",
}

TINY = [
    "model=qwen3_debug",
    "model.dim=32",
    "model.num_layers=1",
    "model.ffn_dim=64",
    "training.seq_len=32",
    "training.batch_per_device=4",
    "schedule=constant",
    "schedule.warmup_steps=0",
    "data=synthetic",
    "validation.steps=0",
    "logging.wandb.mode=disabled",
]


def tpu_train(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpu_train.cli", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def metrics_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    source = SavedRun(run_dir).weights(step)
    return {name: source.load(name) for name in source.specs}


def test_a_run_writes_one_line_a_step_with_the_contracts_fields(tmp_path: Path) -> None:
    done = tpu_train(
        "model=llama3_debug", "data=stdlib", "training.steps=20", "validation.steps=1", "run_dir=r1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    *steps, held_out = metrics_of(tmp_path / "r1")
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert all(line.keys() >= CONTRACT_FIELDS for line in steps)
    assert {line["compile_count"] for line in steps} == {1}
    assert {line["peak_memory_source"] for line in steps} == {"process_resident"}
    # A fresh model guesses: ln(320) nats; 20 steps of text teach it that bytes are not uniform.
    assert steps[0]["loss"] == pytest.approx(np.log(320), rel=0.02)
    assert held_out.keys() == {"step", "validation_loss", "validation_perplexity"}
    assert held_out["validation_perplexity"] == pytest.approx(np.exp(held_out["validation_loss"]))
    assert held_out["validation_loss"] < 4.5
    for line in steps:
        assert line["tokens_per_s"] == pytest.approx(line["tokens"] / line["step_time_s"])
        assert 0 < line["mfu_causal"] < line["mfu"] < 1.5
    # Cosine after 20 steps of warm-up to 1e-3: a twentieth more each step.
    assert [line["lr"] for line in steps] == pytest.approx([1e-3 * n / 20 for n in range(1, 21)])
    assert "run_dir: r1" in (tmp_path / "r1" / "config.yaml").read_text()
    assert "held-out loss" in (tmp_path / "r1" / "log.txt").read_text()
    assert list((tmp_path / "r1" / "wandb").glob("offline-run-*"))
    assert "layers.0.attention.query.weight" in weights(tmp_path / "r1", 20)
    again = tpu_train(*TINY, "run_dir=r1", cwd=tmp_path)
    assert again.returncode == 2
    assert "model.family was 'llama3' and is now 'qwen3', which the weights in r1 do not fit" in again.stderr
    assert len(metrics_of(tmp_path / "r1")) == 21


def test_stop_ends_with_the_weights_before_the_bad_step(tmp_path: Path) -> None:
    stopped = tpu_train(*TINY, "training.steps=8", "training.inject_inf_at_step=5", "run_dir=stop", cwd=tmp_path)
    assert stopped.returncode == 1
    assert "step 5 has a non-finite loss or gradient norm" in stopped.stderr
    assert f"the weights of step 4 are in {tmp_path}/stop/checkpoints/4" in stopped.stderr
    lines = metrics_of(tmp_path / "stop")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[4]["loss"] is None
    four = tpu_train(*TINY, "training.steps=4", "run_dir=four", cwd=tmp_path)
    assert four.returncode == 0, four.stderr
    expected, kept = weights(tmp_path / "four", 4), weights(tmp_path / "stop", 4)
    assert Checkpoints(tmp_path / "stop").steps() == [4]
    assert expected.keys() == kept.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(kept[name], value)


def test_skip_leaves_the_step_out_counts_it_and_goes_on(tmp_path: Path) -> None:
    words = [*TINY, "training.steps=8", "training.inject_inf_at_step=5", "training.on_nan=skip", "run_dir=skip"]
    done = tpu_train(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = metrics_of(tmp_path / "skip")
    assert [line["skipped_steps"] for line in lines] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert lines[4]["loss"] is None
    assert all(np.isfinite(line["loss"]) for line in lines if line["step"] != 5)
    assert "1 of 8 steps were skipped" in done.stderr
    assert all(np.isfinite(value).all() for value in weights(tmp_path / "skip", 8).values())


def test_runs_of_one_seed_are_bitwise_equal_and_seeds_differ(tmp_path: Path) -> None:
    losses = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        words = [*TINY, "model.dropout=0.1", "training.steps=3", f"training.seed={seed}", f"run_dir={name}"]
        done = tpu_train(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses[name] = [line["loss"] for line in metrics_of(tmp_path / name)]
    assert losses["a"] == losses["b"]
    assert losses["a"] != losses["c"]


def test_data_errors_are_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    words = [word for word in TINY if word != "data=synthetic"]
    refused = tpu_train(*words, "data=text", "data.path=bad.jsonl", "run_dir=r", cwd=tmp_path)
    assert refused.returncode == 2
    assert "bad.jsonl:2" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "r").exists()


def test_a_missing_platform_is_refused(tmp_path: Path) -> None:
    refused = tpu_train(*TINY, "runtime.platform=gpu", "run_dir=r", cwd=tmp_path)
    assert refused.returncode == 2
    assert "runtime.platform=gpu" in refused.stderr
    assert "Traceback" not in refused.stderr
