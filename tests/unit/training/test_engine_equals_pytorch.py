"""A run's captured step against a plain PyTorch loop on the same weights and batches, within DESIGN's tolerances."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.runs import LLAMA3, QWEN3, SGD, make_run, random_batches, train_in_torch
from tpu_train.config import schema
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import named_leaves
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


@pytest.mark.parametrize("accumulation", [1, 2])
def test_frozen_parameters_keep_their_values_and_have_no_moments(accumulation: int) -> None:
    run = make_run(training={"grad_accumulation": accumulation})
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


class Shifted(nn.Module):
    """A language model with a buffer: logits by token, shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(320, 320)
        self.register_buffer("shift", torch.linspace(0, 3, 320))

    def forward(self, tokens: Tensor, positions: Tensor, segment_ids: Tensor | None) -> Tensor:
        return self.table(tokens) + self.shift


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_module_of_the_users_own_with_a_buffer_trains(accumulation: int) -> None:
    run = make_run(training={"grad_accumulation": accumulation})
    model = Shifted()
    engine = Engine(run, Runtime("cpu"), model)
    state = engine.initial_state()
    batch = random_batches(1, run, ignored=True)[0]
    with torch.no_grad():
        model.table.weight.copy_(torch.from_numpy(np.array(state["params"]["table.weight"])))
        logits = model(torch.from_numpy(batch["tokens"]).long(), torch.tensor(0), None)
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch["labels"]).long().flatten())
    _, metrics = engine.step(state, batch, 1e-3)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-5)


def test_a_buffer_without_values_is_refused() -> None:
    with torch.device("meta"):
        model = Shifted()
    with pytest.raises(ValueError, match="buffer shift has no values"):
        Engine(make_run(), Runtime("cpu"), model).initial_state()


def snapshot(state: Any) -> dict[str, np.ndarray]:
    """Everything that an update changes, copied."""
    parts = {part: state[part] for part in ("params", "optimizer", "updates")}
    return {name: np.array(value) for name, value in named_leaves(parts)}


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_step_that_is_not_finite_changes_nothing_and_stop_keeps_it_so(on_nan: str) -> None:
    run = make_run(training={"on_nan": on_nan, "inject_inf_at_step": 2})
    engine = Engine(run, Runtime("cpu"))
    batches = random_batches(3, run)
    state, _ = engine.step(engine.initial_state(), batches[0], 1e-3)
    before = snapshot(state)
    state, metrics = engine.step(state, batches[1], 1e-3)
    assert not metrics["finite"]
    after = snapshot(state)
    assert all((after[name] == before[name]).all() for name in before)
    state, metrics = engine.step(state, batches[2], 1e-3)
    assert metrics["finite"]
    later = snapshot(state)
    changed = {name for name in before if (later[name] != before[name]).any()}
    assert changed == (set() if on_nan == "stop" else set(before))
    assert int(state["step"]) == 3
    assert int(state["updates"]) == (1 if on_nan == "stop" else 2)


@pytest.mark.parametrize("field", ["tokens", "labels"])
def test_ids_beyond_the_vocabulary_make_the_step_not_finite(field: str) -> None:
    run = make_run()
    engine = Engine(run, Runtime("cpu"))
    batch = random_batches(1, run)[0]
    batch[field][3, 5] = 100_000
    _, metrics = engine.step(engine.initial_state(), batch, 1e-3)
    assert not metrics["finite"]


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
