"""A mixture of experts through the captured step, against plain PyTorch: weights, load-balancing loss, statistics."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.unit import runs
from tests.unit.runs import SGD, build_torch_model, make_run, random_batches, train_in_torch
from tpu_train.config import schema
from tpu_train.execution.runtime import Runtime
from tpu_train.sharding.plan import NO_PLAN
from tpu_train.training.engine import Engine

# Fewer experts than the shipped models compile faster.
QWEN3_MOE = dataclasses.replace(runs.QWEN3_MOE, num_experts=4)
STEPS = 10
COEF = 0.1


def run_graph(
    run: schema.Run, batches: list[dict[str, np.ndarray]]
) -> tuple[dict[str, np.ndarray], list[dict[str, float]], dict[str, np.ndarray]]:
    """Initial weights, metrics per step, final weights of the captured step."""
    runtime = Runtime("cpu")
    engine = Engine(run, runtime, plan=NO_PLAN)
    state = engine.initial_state()
    initial = {name: np.array(value) for name, value in runtime.fetch(state["params"]).items()}
    metrics = []
    for batch in batches:
        state, step_metrics = engine.step(state, batch, run.optimizer.lr)
        metrics.append({name: float(value) for name, value in runtime.fetch(step_metrics).items()})
    return initial, metrics, runtime.fetch(state["params"])


def assert_weights_equal(final: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        assert np.linalg.norm(final[name] - value) / np.linalg.norm(value) <= 1e-5, name
        np.testing.assert_allclose(final[name], value, atol=1e-4, rtol=0, err_msg=name)


@pytest.mark.parametrize(("accumulation", "norm_topk_prob"), [(1, True), (4, False)])
def test_adamw_steps_equal_pytorch(accumulation: int, norm_topk_prob: bool) -> None:
    model = dataclasses.replace(QWEN3_MOE, norm_topk_prob=norm_topk_prob)
    run = make_run(model=model, training={"grad_accumulation": accumulation, "max_grad_norm": 0.3})
    batches = random_batches(STEPS, run, ignored=True)
    initial, metrics, final = run_graph(run, batches)
    expected = train_in_torch(run, initial, batches)
    assert max(expected.grad_norms) > 0.3, "clipping must be active"
    np.testing.assert_allclose([m["loss"] for m in metrics], expected.losses, rtol=1e-5)
    np.testing.assert_allclose(metrics[0]["grad_norm"], expected.grad_norms[0], rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in metrics], expected.grad_norms, rtol=1e-4)
    assert_weights_equal(final, expected.params)


def routed(model: Any, tokens: Tensor) -> tuple[Tensor, Any]:
    """The model's logits, and its routers' by layer."""
    seen: list[Tensor] = []
    hooks = [
        layer.feed_forward.router.register_forward_pre_hook(lambda r, args: seen.append(F.linear(args[0], r.weight)))
        for layer in model.layers
    ]
    logits = model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))
    for hook in hooks:
        hook.remove()
    return logits, tuple(seen)


def balanced_loss(model: nn.Module, tokens: Tensor, labels: Tensor, accumulation: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and load-balancing loss of a step as the documentation has them; assignments by layer and expert."""
    total, balance = torch.zeros(()), torch.zeros(())
    counts = torch.zeros(QWEN3_MOE.num_layers, QWEN3_MOE.num_experts)
    valid = int((labels != -100).sum())
    for part, targets in zip(tokens.chunk(accumulation), labels.chunk(accumulation), strict=True):
        logits, router_logits = routed(model, part)
        own = load_balancing_loss_func(router_logits, QWEN3_MOE.num_experts, QWEN3_MOE.top_k)
        share = int((targets != -100).sum()) / valid
        total = total + F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid
        balance = balance + own * share
        for i, layer in enumerate(router_logits):
            chosen = layer.topk(QWEN3_MOE.top_k).indices.flatten()
            counts[i] += torch.bincount(chosen, minlength=QWEN3_MOE.num_experts)
    return total + COEF * balance, balance, counts


@pytest.mark.parametrize("accumulation", [1, 4])
def test_load_balancing_loss_and_router_statistics_equal_pytorch(accumulation: int) -> None:
    model = dataclasses.replace(QWEN3_MOE, router_aux_loss_coef=COEF)
    run = make_run(model=model, optimizer=SGD, training={"grad_accumulation": accumulation})
    batches = random_batches(3, run, ignored=True)
    if accumulation > 1:
        assert (batches[0]["labels"][-2:] == -100).all(), "one microbatch has no valid label"
    initial, metrics, final = run_graph(run, batches)
    reference = build_torch_model(model, initial)
    named = dict(reference.named_parameters())
    kept = [p for name, p in named.items() if "norm" in name]
    others = [p for name, p in named.items() if "norm" not in name]
    groups = [{"params": others, "weight_decay": SGD.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=SGD.lr, momentum=SGD.momentum)
    for batch, found in zip(batches, metrics, strict=True):
        tokens, labels = (torch.from_numpy(batch[name]).long() for name in ("tokens", "labels"))
        loss, balance, counts = balanced_loss(reference, tokens, labels, accumulation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert found["router_aux_loss"] == pytest.approx(balance.item(), rel=1e-5)
        load = counts / counts.mean(1, keepdim=True)
        assert found["router_load_max"] == pytest.approx(load.amax(1).mean().item(), rel=1e-6)
        assert found["router_load_min"] == pytest.approx(load.amin(1).mean().item(), rel=1e-6)
        assert found["router_dropped"] == 0
    assert_weights_equal(final, {name: p.detach().numpy() for name, p in named.items()})
    assert metrics[0]["router_load_max"] > 1.2, "routing must be uneven"
