"""PyTorch's int64 is int32 on the device, unless the graph needs more."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import TensorSpec, capture
from tpu_train.lowering.interpreter import needs_64_bit

RUNTIME = Runtime("cpu")


def run(function: Callable[[Tensor], Tensor], x: np.ndarray) -> np.ndarray:
    program = Program(
        "test", lambda specs: capture("test", lambda x: {"y": function(x)}, specs), LoweringOptions(check=True)
    )
    return RUNTIME.fetch(program(x=RUNTIME.put(x)))["y"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.arange(x.shape[0]),
        lambda x: x.long() * 7,
        lambda x: x.sum(),
        lambda x: x[1:].argmax() + x[..., :-1].long().sum(),
    ],
    ids=["arange", "long", "sum", "slices"],
)
def test_default_integers_are_32_bit(function: Callable[[Tensor], Tensor]) -> None:
    x = np.arange(4, dtype=np.int32)
    out = run(function, x)
    assert out.dtype == np.int32
    np.testing.assert_array_equal(out, function(torch.from_numpy(x)).numpy())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.long() * 3_000_000_000,
        lambda x: torch.full_like(x, -(2**40), dtype=torch.int64) + x,
        lambda x: x.long() + torch.tensor(2**40),
        lambda x: x.long() + torch.tensor([2**40, 1, -(2**50), 0]),
        lambda x: x.double() / 3,
        lambda x: (x.double() * (1 + 1e-12)).sum() - x.double().sum(),
    ],
    ids=["constant", "full", "tensor_constant", "tensor_constants", "float64", "float64_sum"],
)
def test_a_graph_that_needs_64_bits_has_them(function: Callable[[Tensor], Tensor]) -> None:
    x = np.arange(4, dtype=np.int32)
    out = run(function, x)
    expected = function(torch.from_numpy(x)).numpy()
    assert out.dtype == expected.dtype
    np.testing.assert_array_equal(out, expected)


def test_a_draw_of_large_integers_has_64_bits() -> None:
    captured = capture("test", lambda: {"y": torch.randint(2**40, (3,))}, {})
    assert needs_64_bit(captured.graph)


def test_slices_to_the_end_and_sites_of_draws_need_no_64_bits() -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        return {"y": x[1:] + torch.rand(3)}

    captured = capture("test", function, {"x": TensorSpec((4,), torch.float32)})
    assert not needs_64_bit(captured.graph)
