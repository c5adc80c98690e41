"""Arguments written by hand, on top of PyTorch's own samples (`table_sources`).

They are for the ops that those never reach, and for edge rules: nan, ties, negative and missing dimensions, empty and
0-d tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def values(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random numbers; integers between -5 and 5 without 0, so that they may divide."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    magnitude = torch.randint(1, 6, shape, generator=generator)
    return (magnitude * (torch.randint(0, 2, shape, generator=generator) * 2 - 1)).to(dtype)


def with_nan(dtype: torch.dtype) -> Tensor:
    """A matrix with nan, both infinities, both zeros and ties, for floats; with ties for integers."""
    if not dtype.is_floating_point:
        return torch.tensor([[3, -1, 3], [0, 0, 0], [2, 5, -4]], dtype=dtype)
    nan, inf = float("nan"), float("inf")
    return torch.tensor([[nan, 1.0, -2.0], [inf, -inf, 0.0], [-0.0, 3.0, 3.0], [2.0, nan, nan]], dtype=dtype)


def _reduction(dtype: torch.dtype) -> list[Arguments]:
    x = with_nan(dtype)
    return [call(x, -1), call(x, 0, True)]


def _number_operand(dtype: torch.dtype) -> list[Arguments]:
    x = values(dtype, 3, 4)
    return [call(x, 3), call(x, 2.5), call(x, -2)]


def _bit_operand(dtype: torch.dtype) -> list[Arguments]:
    return [call(values(dtype, 3, 4), 6), call(values(dtype, 2), 1)]


def _powers(dtype: torch.dtype) -> list[Arguments]:
    x = values(dtype, 3, 4)
    if not dtype.is_floating_point:
        return [call(x, 0), call(x, 1), call(x, 3), call(x.abs(), 0.5)]
    positive = [call(x.abs(), exponent) for exponent in (0.5, -0.5, 1.7, -1.5)]
    return [call(x, exponent) for exponent in (0, 1, 1.0, 2, 3, -1, -2, 4.0, 20)] + positive


def _clamps(dtype: torch.dtype) -> list[Arguments]:
    x = with_nan(dtype)
    return [call(x, -1, 2), call(x, None, 1), call(x, -1), call(x, 2, -2), call(x, -0.5, 0.5)]


def _roundings(dtype: torch.dtype) -> list[Arguments]:
    x = torch.tensor([-7, -6, -1, 0, 1, 6, 7], dtype=dtype)
    numbers = (2, -3)
    return [call(x, number, rounding_mode=mode) for number in numbers for mode in ("floor", "trunc")]


def _remainders(dtype: torch.dtype) -> list[Arguments]:
    x = torch.tensor([-7, -6, -1, 0, 1, 6, 7], dtype=dtype)
    return [call(x, 3), call(x, -3), call(x, 2.5)]


def _attention_inputs(dtype: torch.dtype, kv_heads: int, length: int, key_length: int) -> tuple[Tensor, ...]:
    query = values(dtype, 2, 4, length, 8, seed=1)
    return query, values(dtype, 2, kv_heads, key_length, 8, seed=2), values(dtype, 2, kv_heads, key_length, 8, seed=3)


def _attentions(dtype: torch.dtype) -> list[Arguments]:
    mask = torch.zeros(5, 7).masked_fill(torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.3, -torch.inf)
    mask[2] = -torch.inf  # a row that sees nothing
    mask = mask.to(dtype)
    return [
        call(*_attention_inputs(dtype, 2, 6, 6), 0.0, True),
        call(*_attention_inputs(dtype, 1, 6, 6), 0.0, False, scale=0.3),
        call(*_attention_inputs(dtype, 4, 5, 7), 0.0, True),
        call(*_attention_inputs(dtype, 2, 5, 7), attn_mask=mask),
        call(*_attention_inputs(dtype, 4, 5, 7), attn_mask=mask.expand(2, 4, 5, 7)),
    ]


def _attention_gradients(dtype: torch.dtype) -> list[Arguments]:
    found = []
    for args, kwargs in _attentions(dtype):
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)
        grad = values(dtype, *out.shape, seed=4)
        query, key, value, *rest = args
        dropout_and_causal = tuple(rest) or (0.0, False)
        found.append(call(grad, query, key, value, out, logsumexp, *dropout_and_causal, **kwargs))
    return found


def _index(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def _indices(dtype: torch.dtype) -> list[Arguments]:
    x = values(dtype, 4, 5, 6)
    column = torch.tensor([[0], [-1], [2]])
    return [
        call(x, [_index(0, -1, 3)]),
        call(x, [None, _index(4, -5)]),
        call(x, [_index(1, -2), None, _index(0, 5)]),
        call(x, [None, column, _index(1, 2, -1)]),
        call(x, [torch.tensor(2), None, _index(1, 2)]),
    ]


def _index_puts(dtype: torch.dtype) -> list[Arguments]:
    x = values(dtype, 4, 5, 6)
    mask = values(torch.float32, 4, 5) > 0
    found = []
    for accumulate in (False, True):
        rows = _index(0, -1, 0) if accumulate else _index(0, -1, 2)
        found += [
            call(x, [rows], values(dtype, 3, 5, 6, seed=1), accumulate),
            call(x, [None, _index(4, -5)], values(dtype, 1, 2, 1, seed=1), accumulate),
            call(x, [_index(1, -2), None, _index(0, 5)], values(dtype, 2, 5, seed=1), accumulate),
            call(x, [mask], values(dtype, 1, seed=1), accumulate),
            call(x, [None, mask.new_ones(5, 6)], values(dtype, seed=1), accumulate),
            call(x, [mask], values(dtype, 6, seed=1), accumulate),
        ]
    return found


def _batch_norms(dtype: torch.dtype) -> list[Arguments]:
    x, weight, bias = values(dtype, 4, 3, 5), values(dtype, 3, seed=1), values(dtype, 3, seed=2)
    return [
        call(x, weight, bias, None, None, True, 0.1, 1e-5),
        call(x, None, None, None, None, True, 0.1, 1e-5),
        call(x, weight, bias, values(dtype, 3, seed=3), values(dtype, 3, seed=4).abs(), False, 0.1, 1e-5),
    ]


def _losses(dtype: torch.dtype) -> list[Arguments]:
    x = torch.log_softmax(values(dtype, 5, 7), 1)
    x[1] = -torch.inf  # an ignored row may hold anything
    target = _index(3, -100, 0, 6, -100)
    return [call(x, target, None, reduction, -100) for reduction in (0, 1, 2)]


def _loss_gradients(dtype: torch.dtype) -> list[Arguments]:
    found = []
    for (x, target, weight, reduction, ignored), _ in _losses(dtype):
        grad = values(dtype, 5) if reduction == 0 else values(dtype)
        total_weight = torch.tensor(3.0, dtype=dtype)
        found += [call(grad, x, target, weight, reduction, ignored, total_weight)]
        found += [call(grad, x, target.clamp(min=0), weight, reduction, 0, total_weight)]
    return found


def _embedding_gradients(dtype: torch.dtype) -> list[Arguments]:
    indices = torch.tensor([[0, 3, 3], [9, 0, 3]])
    return [call(values(dtype, 2, 3, 4), indices, 10, padding_idx, False) for padding_idx in (-1, 3)]


def _floats(*numbers: float) -> Callable[[torch.dtype], list[Arguments]]:
    """The matrix of special values beside given numbers."""
    return lambda dtype: [call(with_nan(dtype), *numbers)]


# ATen op -> (its arguments for a dtype, the dtypes it must be seen with as in `table_sources`).
HAND_WRITTEN: dict[str, tuple[Callable[[torch.dtype], list[Arguments]], str]] = {
    # Never reached by PyTorch's samples.
    "_unsafe_index.Tensor": (_indices, "fbi"),
    "_unsafe_index_put.default": (_index_puts, "fbi"),
    "bitwise_and.Scalar": (_bit_operand, "i"),
    "bitwise_or.Scalar": (_bit_operand, "i"),
    "bitwise_xor.Scalar": (_bit_operand, "i"),
    "bitwise_left_shift.Tensor_Scalar": (_bit_operand, "i"),
    "bitwise_right_shift.Tensor_Scalar": (_bit_operand, "i"),
    "clamp_max.default": (_floats(1), "fbi"),
    "copy.default": (lambda dtype: [call(values(dtype, 3, 4), values(torch.float32, 4))], "fbi"),
    "div.Scalar_mode": (_roundings, "fbi"),
    "fill.Tensor": (lambda dtype: [call(values(dtype, 3), torch.tensor(2))], "fbi"),
    "fmod.Scalar": (_remainders, "fbi"),
    "lift_fresh_copy.default": (_floats(), "fbi"),
    "remainder.Scalar_Tensor": (lambda dtype: [call(7, values(dtype, 5)), call(-7, values(dtype, 5))], "fbi"),
    "native_batch_norm.default": (_batch_norms, "fb"),
    # Edge rules, and arguments PyTorch's samples lack.
    "_scaled_dot_product_flash_attention_for_cpu.default": (_attentions, "fb"),
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": (_attention_gradients, "fb"),
    "add.Scalar": (_number_operand, "fbi"),
    "sub.Scalar": (_number_operand, "fbi"),
    "mul.Scalar": (_number_operand, "fbi"),
    "div.Scalar": (_number_operand, "fbi"),
    "rsub.Scalar": (_number_operand, "fbi"),
    "remainder.Scalar": (_remainders, "fbi"),
    "eq.Scalar": (_number_operand, "fbi"),
    "ne.Scalar": (_number_operand, "fbi"),
    "lt.Scalar": (_number_operand, "fbi"),
    "le.Scalar": (_number_operand, "fbi"),
    "gt.Scalar": (_number_operand, "fbi"),
    "ge.Scalar": (_number_operand, "fbi"),
    "pow.Tensor_Scalar": (_powers, "fbi"),
    "pow.Scalar": (lambda dtype: [call(2, values(dtype, 4).abs()), call(1.5, values(dtype, 4))], "fbi"),
    "pow.Tensor_Tensor": (lambda dtype: [call(values(dtype, 9).abs(), values(dtype, 9, seed=1))], "fb"),
    "clamp.default": (_clamps, "fbi"),
    "clamp_min.default": (_floats(1), "fbi"),
    "relu.default": (_floats(), "fbi"),
    "sign.default": (_floats(), "fbi"),
    "hardtanh.default": (_floats(-1, 1), "fbi"),
    "threshold_backward.default": (lambda dtype: [call(values(dtype, 3), with_nan(dtype)[0], 0)], "fbi"),
    "maximum.default": (lambda dtype: [call(with_nan(dtype), with_nan(dtype).flip(0))], "fbi"),
    "minimum.default": (lambda dtype: [call(with_nan(dtype), with_nan(dtype).flip(0))], "fbi"),
    "amax.default": (_reduction, "fbi"),
    "amin.default": (_reduction, "fbi"),
    "max.dim": (_reduction, "fbi"),
    "min.dim": (_reduction, "fbi"),
    "argmax.default": (_reduction, "fbi"),
    "argmin.default": (_reduction, "fbi"),
    "sort.stable": (
        lambda dtype: [
            call(with_nan(dtype), stable=True, dim=dim, descending=d) for dim in (0, -1) for d in (False, True)
        ],
        "fbi",
    ),
    "topk.default": (lambda dtype: [call(values(dtype, 20).cumsum(0), 3, 0, False)], "f"),
    "index.Tensor": (_indices, "fbi"),
    "index_put.default": (_index_puts, "fbi"),
    "nll_loss_forward.default": (_losses, "fb"),
    "nll_loss_backward.default": (_loss_gradients, "fb"),
    "cumsum.default": (lambda dtype: [call(values(dtype, 3, 4), dim) for dim in (0, 1, -2)], "fbi"),
    "embedding_dense_backward.default": (_embedding_gradients, "fb"),
    "squeeze.dims": (lambda dtype: [call(values(dtype, 1, 3, 1), [0, 1, -1])], "fbi"),
    "gt.Tensor": (lambda dtype: [call(values(dtype, 3), torch.tensor(0.5))], "fbi"),
}
