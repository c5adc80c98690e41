"""Graph passes: the same values and gradients from another graph, in loop bodies too."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from tests.unit.runs import SGD, make_run, random_batches
from tpu_train.checking import check
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph import passes
from tpu_train.graph.capture import TensorSpec, Tree, capture
from tpu_train.lowering import intrinsics
from tpu_train.lowering.retrace import graph_modules
from tpu_train.training.engine import Engine

RUNTIME = Runtime("cpu")
FUSE = ("fuse_cross_entropy_pass",)


def loss_and_gradient(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tree]:
    def function(x: Tensor, target: Tensor) -> Tree:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            value = loss(x, target.long())
            (grad,) = torch.autograd.grad(value, x)
        return {"loss": value.detach(), "grad": grad}

    return function


def targets_of(function: Callable[..., Tree], x: np.ndarray, target: np.ndarray, names: tuple[str, ...]) -> set:
    specs = {"x": TensorSpec(x.shape, torch.float32), "target": TensorSpec(target.shape, torch.int32)}
    return {node.target for node in capture("test", function, specs, names).graph.graph.nodes}


X = np.random.default_rng(0).normal(size=(12, 509)).astype(np.float32) * 5
TARGET = np.random.default_rng(1).integers(0, 509, 12).astype(np.int32)
TARGET[[2, 5]] = -100


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_fused_cross_entropy_equals_pytorchs(reduction: str) -> None:
    function = loss_and_gradient(lambda x, t: 3 * F.cross_entropy(x, t, reduction=reduction))
    found = targets_of(function, X, TARGET, FUSE)
    assert found >= {intrinsics.cross_entropy, intrinsics.cross_entropy_backward}
    assert not any("softmax" in str(target) or "nll_loss" in str(target) for target in found)
    program = Program("test", lambda specs: capture("test", function, specs, FUSE), LoweringOptions(check=True))
    out = RUNTIME.fetch(program(**RUNTIME.put({"x": X, "target": TARGET})))
    x64 = torch.from_numpy(X).double().requires_grad_()
    expected = 3 * F.cross_entropy(x64, torch.from_numpy(TARGET).long(), reduction=reduction)
    (grad,) = torch.autograd.grad(expected, x64)
    np.testing.assert_allclose(out["loss"], expected.item(), rtol=1e-6)
    np.testing.assert_allclose(out["grad"], grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, t: F.cross_entropy(x, t, weight=torch.ones(509)),
        lambda x, t: F.cross_entropy(x, t, reduction="none").sum(),
        lambda x, t: F.cross_entropy(x.bfloat16(), t),
        lambda x, t: -torch.log_softmax(x, 1).mean() * t.shape[0],
    ],
    ids=["class_weights", "per_row", "bfloat16", "no_nll"],
)
def test_other_losses_stay_as_they_are(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert intrinsics.cross_entropy not in targets_of(loss_and_gradient(loss), X, TARGET, FUSE)


def test_log_probabilities_that_are_used_elsewhere_survive() -> None:
    def function(x: Tensor, target: Tensor) -> Tree:
        logprob = torch.log_softmax(x, 1)
        return {"loss": F.nll_loss(logprob, target.long()), "entropy": -(logprob.exp() * logprob).sum()}

    program = Program("test", lambda specs: capture("test", function, specs, FUSE), LoweringOptions(check=True))
    out = RUNTIME.fetch(program(**RUNTIME.put({"x": X, "target": TARGET})))
    expected = function(torch.from_numpy(X), torch.from_numpy(TARGET))
    for name, value in expected.items():
        np.testing.assert_allclose(out[name], value.numpy(), rtol=1e-5)


def test_passes_reach_the_bodies_of_loops() -> None:
    engine = Engine(make_run(training={"grad_accumulation": 2}), RUNTIME)
    inputs = engine.step_inputs(random_batches(1, make_run())[0], 0.0)
    captured = engine.train_step.capture(state=engine.initial_state(), **inputs)
    outer, body = graph_modules(captured.graph)
    assert intrinsics.cross_entropy_backward in {node.target for node in body.graph.nodes}
    assert intrinsics.cross_entropy_backward not in {node.target for node in outer.graph.nodes}


def test_a_step_is_the_same_with_and_without_passes() -> None:
    run = make_run(optimizer=SGD)
    plain = dataclasses.replace(run, mode=dataclasses.replace(run.mode, passes=()))
    results = []
    for variant in (run, plain):
        engine = Engine(variant, RUNTIME)
        state, metrics = engine.step(engine.initial_state(), random_batches(1, run, ignored=True)[0], 1e-3)
        results.append((RUNTIME.fetch(metrics), RUNTIME.fetch(state["params"])))
    np.testing.assert_allclose(results[0][0]["loss"], results[1][0]["loss"], rtol=1e-6)
    for name, value in results[0][1].items():
        assert np.linalg.norm(value - results[1][1][name]) <= 1e-6 * np.linalg.norm(value), name


def test_a_pass_that_breaks_the_contract_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_output(graph: fx.Graph) -> None:
        graph.output_node().args = ([],)

    monkeypatch.setitem(passes.PASSES, "drop_output", drop_output)
    with pytest.raises(AssertionError, match="drop_output changed the inputs or outputs"):
        capture("test", lambda x: {"y": x + 1}, {"x": TensorSpec((2,), torch.float32)}, ("drop_output",))


def test_an_unknown_pass_is_refused_with_the_choices() -> None:
    run = make_run()
    run = dataclasses.replace(run, mode=dataclasses.replace(run.mode, passes=("fuse_everything",)))
    (problem,) = [p for p in check(run) if "passes" in p.place]
    assert "fuse_everything; allowed are fuse_cross_entropy_pass" in problem.message
