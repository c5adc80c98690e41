"""Tensors made from shapes and numbers. What PyTorch leaves uninitialized is zero here."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import Operand, jax_dtype

aten = torch.ops.aten

Dtype = jnp.dtype | None


def _inferred_dtype(*numbers: Operand) -> jnp.dtype:
    """PyTorch's dtype for a tensor made of Python numbers: float32 if any is a float, else int64 or bool."""
    if all(isinstance(number, bool) for number in numbers):
        return jax_dtype(torch.bool)
    return jax_dtype(torch.int64 if all(isinstance(number, int) for number in numbers) else torch.float32)


def full(size: Sequence[int], fill_value: Operand, *, dtype: Dtype = None) -> Array:
    return jnp.full(tuple(size), fill_value, _inferred_dtype(fill_value) if dtype is None else dtype)


def zeros(size: Sequence[int], *, dtype: Dtype = None) -> Array:
    return full(size, 0, dtype=dtype or jax_dtype(torch.float32))


def ones(size: Sequence[int], *, dtype: Dtype = None) -> Array:
    return full(size, 1, dtype=dtype or jax_dtype(torch.float32))


def empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: Dtype = None) -> Array:
    return zeros(size, dtype=dtype)


def full_like(x: Array, fill_value: Operand, *, dtype: Dtype = None) -> Array:
    return full(x.shape, fill_value, dtype=dtype or x.dtype)


def zeros_like(x: Array, *, dtype: Dtype = None) -> Array:
    return full(x.shape, 0, dtype=dtype or x.dtype)


def ones_like(x: Array, *, dtype: Dtype = None) -> Array:
    return full(x.shape, 1, dtype=dtype or x.dtype)


def new_full(x: Array, size: Sequence[int], fill_value: Operand, *, dtype: Dtype = None) -> Array:
    return full(size, fill_value, dtype=dtype or x.dtype)


def new_zeros(x: Array, size: Sequence[int], *, dtype: Dtype = None) -> Array:
    return full(size, 0, dtype=dtype or x.dtype)


def new_ones(x: Array, size: Sequence[int], *, dtype: Dtype = None) -> Array:
    return full(size, 1, dtype=dtype or x.dtype)


def new_empty_strided(x: Array, size: Sequence[int], stride: Sequence[int], *, dtype: Dtype = None) -> Array:
    return new_zeros(x, size, dtype=dtype)


def arange(end: float, *, dtype: Dtype = None) -> Array:
    return arange_step(0, end, dtype=dtype)


def arange_step(start: float, end: float, step: float = 1, *, dtype: Dtype = None) -> Array:
    dtype = _inferred_dtype(start, end, step) if dtype is None else dtype
    if jnp.issubdtype(dtype, jnp.integer):
        start, end, step = int(start), int(end), int(step)  # before counting, as for PyTorch's int64
    length = math.ceil((end - start) / step)
    if jnp.issubdtype(dtype, jnp.integer):
        values = lax.iota(dtype, length)
        return values if (start, step) == (0, 1) else values * step + start
    # 16-bit floats count in float32: 256 + 1 is 256 in bfloat16.
    wide = jnp.float32 if dtype != jnp.float64 else dtype
    return (lax.iota(wide, length) * step + start).astype(dtype)


def linspace(start: float, end: float, steps: int, *, dtype: Dtype = None) -> Array:
    dtype = jax_dtype(torch.float32) if dtype is None else dtype
    if steps <= 1:
        return jnp.full((steps,), start).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        start, end = int(start), int(end)
    # In float64 on the host: integers are cut, so a last bit decides. From both ends, so that both are exact.
    step = (end - start) / (steps - 1)
    index = np.arange(steps)
    values = np.where(index < steps // 2, start + step * index, end - step * (steps - 1 - index))
    return jnp.asarray(values.astype(dtype))


def scalar_tensor(value: Operand, *, dtype: Dtype = None) -> Array:
    return full((), value, dtype=dtype or jax_dtype(torch.float32))


def eye(n: int, m: int | None = None, *, dtype: Dtype = None) -> Array:
    return jnp.eye(n, m, dtype=dtype or jax_dtype(torch.float32))


OPS: dict[Any, Callable[..., Any]] = {
    aten.full.default: full,
    aten.zeros.default: zeros,
    aten.ones.default: ones,
    aten.empty.memory_format: zeros,
    aten.empty_strided.default: empty_strided,
    aten.full_like.default: full_like,
    aten.zeros_like.default: zeros_like,
    aten.ones_like.default: ones_like,
    aten.empty_like.default: zeros_like,
    aten.new_full.default: new_full,
    aten.new_zeros.default: new_zeros,
    aten.new_ones.default: new_ones,
    aten.new_empty.default: new_zeros,
    aten.new_empty_strided.default: new_empty_strided,
    aten.arange.default: arange,
    aten.arange.start: arange_step,
    aten.arange.start_step: arange_step,
    aten.linspace.default: linspace,
    aten.scalar_tensor.default: scalar_tensor,
    aten.eye.default: eye,
    aten.eye.m: eye,
}
