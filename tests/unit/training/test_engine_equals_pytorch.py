"""A run's captured step against a plain PyTorch loop on the same weights and batches, within DESIGN's tolerances."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.unit.runs import LLAMA3, QWEN3, SGD, make_run, random_batches, train_in_torch
from tpu_train.config import schema
from tpu_train.execution.runtime import Runtime
from tpu_train.training.build import build_model
from tpu_train.training.engine import Engine

STEPS = 20


def run_graph(
    run: schema.Run, batches: list[dict[str, np.ndarray]]
) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    """Initial weights, metrics per step, final weights of the captured step."""
    runtime = Runtime("cpu")
    engine = Engine(run, runtime)
    state = engine.initial_state()
    initial = runtime.fetch(state["params"])
    initial = {name: np.array(value) for name, value in initial.items()}
    metrics = []
    for batch in batches:
        state, step_metrics = engine.step(state, batch, run.optimizer.lr)
        metrics.append(runtime.fetch(step_metrics))
    return initial, metrics, runtime.fetch(state["params"])


@pytest.mark.parametrize("model", [QWEN3, LLAMA3], ids=["qwen3_tied", "llama3_untied_scaled"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("ignored", [False, True], ids=["all_labels", "unequal_ignored_labels"])
def test_twenty_adamw_steps_equal_pytorch(model: Any, accumulation: int, ignored: bool) -> None:
    run = make_run(model=model, training={"grad_accumulation": accumulation, "max_grad_norm": 0.3})
    batches = random_batches(STEPS, run, ignored)
    if ignored:
        assert (batches[0]["labels"][-2:] == -100).all(), "with 4 microbatches, one has no valid label"
    initial, metrics, final = run_graph(run, batches)
    expected = train_in_torch(run, initial, batches)
    assert max(expected.grad_norms) > 0.3, "clipping must be active"
    np.testing.assert_allclose([m["loss"] for m in metrics], expected.losses, rtol=1e-5)
    np.testing.assert_allclose(metrics[0]["grad_norm"], expected.grad_norms[0], rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], expected.grad_norms, rtol=1e-4)
    assert [int(m["weight"]) for m in metrics] == [int((b["labels"] != -100).sum()) for b in batches]
    for name, value in expected.params.items():
        assert np.linalg.norm(final[name] - value) / np.linalg.norm(value) <= 1e-5, name
        np.testing.assert_allclose(final[name], value, atol=1e-4, rtol=0, err_msg=name)


def test_frozen_parameters_keep_their_values_and_have_no_moments() -> None:
    run = make_run()
    model = build_model(run.model)
    model.get_parameter("embedding.weight").requires_grad_(False)
    runtime = Runtime("cpu")
    engine = Engine(run, runtime, model)
    state = engine.initial_state()
    before = np.array(state["frozen"]["embedding.weight"])
    assert "embedding.weight" not in state["optimizer"]["mu"]
    gate = np.array(state["params"]["layers.0.feed_forward.gate.weight"])
    state, _ = engine.step(state, random_batches(1, run)[0], 1e-3)
    np.testing.assert_array_equal(state["frozen"]["embedding.weight"], before)
    assert (np.array(state["params"]["layers.0.feed_forward.gate.weight"]) != gate).mean() > 0.99


def test_twenty_sgd_steps_equal_pytorch() -> None:
    run = make_run(optimizer=SGD)
    batches = random_batches(STEPS, run)
    initial, metrics, final = run_graph(run, batches)
    expected = train_in_torch(run, initial, batches)
    np.testing.assert_allclose([m["loss"] for m in metrics], expected.losses, rtol=1e-5)
    for name, value in expected.params.items():
        assert np.linalg.norm(final[name] - value) / np.linalg.norm(value) <= 1e-6, name


def test_bf16_mixed_keeps_float32_weights_and_follows_the_float32_run() -> None:
    run = make_run()
    mixed = dataclasses.replace(run, precision=schema.Precision(param="float32", compute="bfloat16", matmul="default"))
    batches = random_batches(5, run)
    _, exact, _ = run_graph(run, batches)
    _, rounded, final = run_graph(mixed, batches)
    assert all(value.dtype == np.float32 for value in final.values())
    np.testing.assert_allclose([m["loss"] for m in rounded], [m["loss"] for m in exact], rtol=1.6e-2)


def test_bf16_keeps_bfloat16_weights_and_moments() -> None:
    model = dataclasses.replace(LLAMA3, init_std=0.02)
    run = make_run(model=model, precision=schema.Precision(param="bfloat16", compute="bfloat16", matmul="default"))
    runtime = Runtime("cpu")
    engine = Engine(run, runtime)
    state = engine.initial_state()
    state, metrics = engine.step(state, random_batches(1, run)[0], 1e-3)
    moments = [m for slot in state["optimizer"].values() for m in slot.values()]
    assert {str(value.dtype) for value in [*state["params"].values(), *moments]} == {"bfloat16"}
    # ln(320) nats: a fresh model knows nothing of random tokens.
    assert float(metrics["loss"]) == pytest.approx(np.log(320), rel=1.6e-2)
