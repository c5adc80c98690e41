"""Documents packed into one sequence do not see each other, on every path that attention takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.runs import LLAMA3, QWEN3
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import capture
from tpu_train.models.decoder import Decoder
from tpu_train.training.build import build_model

Path = Callable[[nn.Module, dict[str, Tensor]], tuple[Tensor, list[Tensor]]]

# Document A is tokens 0 to 11, document B the rest; row 1 has B in the middle, between A and C.
SEGMENTS = torch.tensor([[0] * 12 + [1] * 20, [0] * 7 + [1] * 15 + [2] * 10], dtype=torch.int32)
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ([12, 20], [7, 15, 10])]).int()
IN_B = SEGMENTS == 1


def loss_of_b(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), torch.where(IN_B, labels, -100).flatten().long(), reduction="sum")


def batch(seed: int) -> dict[str, Tensor]:
    """Tokens that differ between seeds everywhere but in B."""
    tokens = torch.randint(0, 300, SEGMENTS.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    other = torch.randint(0, 300, SEGMENTS.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    labels = torch.randint(0, 300, SEGMENTS.shape, generator=torch.Generator().manual_seed(9), dtype=torch.int32)
    return {"tokens": torch.where(IN_B, tokens, other), "labels": labels}


def in_pytorch(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    logits = model(inputs["tokens"], POSITIONS, SEGMENTS)
    return logits.detach(), list(torch.autograd.grad(loss_of_b(logits, inputs["labels"]), list(model.parameters())))


def in_the_captured_graph(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    def function(params: Any, tokens: Tensor, labels: Tensor, positions: Tensor, segments: Tensor) -> Any:
        leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
        with torch.enable_grad():
            logits = torch.func.functional_call(model, leaves, (tokens, positions, segments))
            masked = torch.where(segments == 1, labels, -100).flatten().long()
            loss = F.cross_entropy(logits.flatten(0, 1), masked, reduction="sum")
            grads = torch.autograd.grad(loss, list(leaves.values()))
        return {"logits": logits.detach(), "grads": dict(zip(leaves, grads, strict=True))}

    program = Program("documents", lambda specs: capture("documents", function, specs), LoweringOptions())
    runtime = Runtime("cpu")
    params = {name: value.detach().numpy() for name, value in model.named_parameters()}
    arrays = {"positions": POSITIONS.numpy(), "segments": SEGMENTS.numpy(), **{k: v.numpy() for k, v in inputs.items()}}
    result = runtime.fetch(program(params=runtime.put(params), **runtime.put(arrays)))
    grads = [torch.from_numpy(np.array(result["grads"][name])) for name, _ in model.named_parameters()]
    return torch.from_numpy(np.array(result["logits"])), grads


def through_the_cache(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    """In three pieces, whose borders lie inside documents."""
    assert isinstance(model, Decoder)
    cache = model.empty_cache(len(SEGMENTS), SEGMENTS.shape[1])
    pieces = [
        model(inputs["tokens"][:, at], POSITIONS[:, at], SEGMENTS[:, at], cache)
        for at in (slice(0, 9), slice(9, 20), slice(20, 32))
    ]
    logits = torch.cat(pieces, 1)
    return logits.detach(), list(torch.autograd.grad(loss_of_b(logits, inputs["labels"]), list(model.parameters())))


@pytest.mark.parametrize("path", [in_pytorch, in_the_captured_graph, through_the_cache])
@pytest.mark.parametrize("config", [QWEN3, LLAMA3], ids=["qwen3", "llama3"])
def test_another_document_changes_no_logit_and_no_gradient(config: Any, path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(config, "cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    (logits, grads), (other_logits, other_grads) = (path(model, batch(seed)) for seed in (1, 2))
    assert not torch.equal(logits[~IN_B], other_logits[~IN_B])
    assert torch.equal(logits[IN_B], other_logits[IN_B])
    for (name, _), grad, other in zip(model.named_parameters(), grads, other_grads, strict=True):
        assert torch.equal(grad, other), name
    assert sum(float(grad.abs().sum()) for grad in grads) > 0
