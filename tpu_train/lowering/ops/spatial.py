"""Pooling and resizing of images.

Key idea: which inputs an output reads is known while tracing, so indices, weights and divisors are NumPy constants per
dimension. Both are linear (max pooling apart): the derivative is the transpose that JAX derives from the forward.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import jax_dtype, widen
from tpu_train.lowering.ops.indexing import scatter_add

aten = torch.ops.aten


def _pair(argument: int | Sequence[int]) -> tuple[int, int]:
    values = [argument] if isinstance(argument, int) else list(argument)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


def _pooled_length(length: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    reach = length + 2 * padding - dilation * (kernel - 1) - 1
    count = (reach + (stride - 1 if ceil_mode else 0)) // stride + 1
    if ceil_mode and (count - 1) * stride >= length + padding:
        count -= 1  # the last window would start in the padding
    return count


def _pooling(
    x: Array, kernel: Sequence[int], stride: Sequence[int], padding: Any, dilation: Any, ceil_mode: bool
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Kernel, stride, padding, dilation as pairs, and the output's height and width."""
    kernels, paddings, dilations = _pair(kernel), _pair(padding), _pair(dilation)
    strides = _pair(stride) if stride else kernels
    lengths = zip(x.shape[-2:], kernels, strides, paddings, dilations, strict=True)
    height, width = (_pooled_length(*arguments, ceil_mode=ceil_mode) for arguments in lengths)
    return kernels, strides, paddings, dilations, (height, width)


def avg_pool2d(
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    kernel, stride, pads, _, out = _pooling(x, kernel_size, stride, padding, 1, ceil_mode)
    counts, window_pads = [], []
    for length, k, s, p, n in zip(x.shape[-2:], kernel, stride, pads, out, strict=True):
        start = np.arange(n) * s - p
        end = np.minimum(start + k, length + p)
        counts.append(end - start if count_include_pad else np.minimum(end, length) - np.maximum(start, 0))
        window_pads.append((p, max(0, (n - 1) * s + k - length - p)))
    lead = x.ndim - 2
    total = lax.reduce_window(
        widen(x),
        np.zeros((), widen(x).dtype),  # a constant: JAX knows the derivative of sums only
        lax.add,
        (1,) * lead + kernel,
        (1,) * lead + stride,
        [(0, 0)] * lead + window_pads,
    )
    divisor = np.outer(*counts) if divisor_override is None else np.asarray(divisor_override)
    return (total / divisor.astype(total.dtype)).astype(x.dtype)


def avg_pool2d_backward(grad: Array, x: Array, *arguments: Any) -> Array:
    return _transposed(lambda x: avg_pool2d(x, *arguments), x.shape, grad)


def _transposed(forward: Callable[[Array], Array], shape: Sequence[int], grad: Array) -> Array:
    """The transpose of a linear function of one tensor, applied to `grad` in float32."""
    wide = widen(grad)
    (result,) = jax.linear_transpose(forward, jax.ShapeDtypeStruct(tuple(shape), wide.dtype))(wide)
    return result.astype(grad.dtype)


def max_pool2d_with_indices(
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> tuple[Array, Array]:
    kernel, stride, pads, dilation, out = _pooling(x, kernel_size, stride, padding, dilation, ceil_mode)
    lowest = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    padding_config = [(0, 0, 0)] * (x.ndim - 2)
    for length, k, s, p, d, n in zip(x.shape[-2:], kernel, stride, pads, dilation, out, strict=True):
        padding_config.append((p, max(0, (n - 1) * s + d * (k - 1) + 1 - length - p), 0))
    padded = lax.pad(x, jnp.asarray(lowest, x.dtype), padding_config)
    # One strided slice per place of the (small) kernel; the index of the largest says where it came from.
    taps = [
        padded[..., i * dilation[0] :: stride[0], j * dilation[1] :: stride[1]][..., : out[0], : out[1]]
        for i in range(kernel[0])
        for j in range(kernel[1])
    ]
    stacked = jnp.stack(taps)
    index_dtype = jax_dtype(torch.int64)
    best = lax.argmax(stacked, 0, index_dtype)
    row = best // kernel[1] * dilation[0] + lax.broadcasted_iota(index_dtype, best.shape, x.ndim - 2) * stride[0]
    column = best % kernel[1] * dilation[1] + lax.broadcasted_iota(index_dtype, best.shape, x.ndim - 1) * stride[1]
    return jnp.max(stacked, 0), (row - pads[0]) * x.shape[-1] + (column - pads[1])


def max_pool2d_with_indices_backward(
    grad: Array,
    x: Array,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Array,
) -> Array:
    lead = math.prod(x.shape[:-2])
    flat = jnp.zeros((lead, x.shape[-2] * x.shape[-1]), grad.dtype)
    summed = scatter_add(flat, 1, indices.reshape(lead, -1), grad.reshape(lead, -1))
    return summed.reshape(x.shape)


def adaptive_avg_pool2d(x: Array, output_size: Sequence[int]) -> Array:
    out = widen(x)
    for dim, n in zip((-2, -1), output_size, strict=True):
        out = _average_parts(out, dim, n)
    return out.astype(x.dtype)


def _average_parts(x: Array, dim: int, parts: int) -> Array:
    """Means over `parts` (possibly overlapping) stretches of `dim`, as a product with a small constant matrix."""
    length = x.shape[dim]
    matrix = np.zeros((parts, length), np.float32)
    for i in range(parts):
        start, end = i * length // parts, -(-(i + 1) * length // parts)
        matrix[i, start:end] = 1 / (end - start)
    product = jnp.tensordot(x, jnp.asarray(matrix, x.dtype), ((dim % x.ndim,), (1,)), precision="highest")
    return jnp.moveaxis(product, -1, dim)


def adaptive_avg_pool2d_backward(grad: Array, x: Array) -> Array:
    return _transposed(lambda x: adaptive_avg_pool2d(x, grad.shape[-2:]), x.shape, grad)


def _step(length: int, out_length: int, scale: float | None) -> np.float32:
    """Input elements per output element, as PyTorch's kernels round it."""
    if scale is not None and scale > 0:
        return np.float32(1 / scale)
    return np.float32(length) / np.float32(out_length)


def _upsample_nearest(x: Array, output_size: Sequence[int], scales: Sequence[float | None]) -> Array:
    for i, (n, scale) in enumerate(zip(output_size, scales, strict=True)):
        dim = 2 + i
        length = x.shape[dim]
        index = np.floor(np.arange(n, dtype=np.float32) * _step(length, n, scale)).astype(np.int32)
        x = _take_static(x, np.minimum(index, length - 1), dim)
    return x


def _take_static(x: Array, index: np.ndarray, dim: int) -> Array:
    """`x` at known positions of `dim`. Whole repeats, the usual case, are a broadcast, whose transpose is a sum."""
    length, n = x.shape[dim], len(index)
    if n % length == 0 and (index == np.arange(n) // (n // length)).all():
        shape = (*x.shape[: dim + 1], n // length, *x.shape[dim + 1 :])
        repeated = jnp.broadcast_to(jnp.expand_dims(x, dim + 1), shape)
        return repeated.reshape(*x.shape[:dim], n, *x.shape[dim + 1 :])
    return jnp.take(x, index, axis=dim, mode="clip")


def upsample_nearest(x: Array, output_size: Sequence[int], *scales: float | None) -> Array:
    return _upsample_nearest(x, output_size, scales or [None] * len(output_size))


def upsample_nearest_backward(
    grad: Array, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> Array:
    return _transposed(lambda x: upsample_nearest(x, output_size, *scales), input_size, grad)


def upsample_linear(x: Array, output_size: Sequence[int], align_corners: bool, *scales: float | None) -> Array:
    out = widen(x)
    for i, (n, scale) in enumerate(zip(output_size, scales or [None] * len(output_size), strict=True)):
        out = _interpolate(out, 2 + i, n, align_corners, scale)
    return out.astype(x.dtype)


def _interpolate(x: Array, dim: int, n: int, align_corners: bool, scale: float | None) -> Array:
    length = x.shape[dim]
    position = np.arange(n, dtype=np.float32)
    if align_corners:
        source = position * np.float32((length - 1) / (n - 1) if n > 1 else 0)
    else:
        source = np.maximum((position + np.float32(0.5)) * _step(length, n, scale) - np.float32(0.5), 0)
    low = np.minimum(np.floor(source).astype(np.int32), length - 1)
    weight = np.clip(source - low, 0, 1).reshape([-1 if d == dim else 1 for d in range(x.ndim)]).astype(x.dtype)
    high = np.minimum(low + 1, length - 1)
    return _take_static(x, low, dim) * (1 - weight) + _take_static(x, high, dim) * weight


def upsample_linear_backward(
    grad: Array, output_size: Sequence[int], input_size: Sequence[int], align_corners: bool, *scales: float | None
) -> Array:
    return _transposed(lambda x: upsample_linear(x, output_size, align_corners, *scales), input_size, grad)


OPS: dict[Any, Callable[..., Any]] = {
    aten.avg_pool2d.default: avg_pool2d,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.max_pool2d_with_indices.default: max_pool2d_with_indices,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_with_indices_backward,
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
    aten.upsample_nearest1d.default: upsample_nearest,
    aten.upsample_nearest1d_backward.default: upsample_nearest_backward,
    aten.upsample_nearest2d.default: upsample_nearest,
    aten.upsample_nearest2d_backward.default: upsample_nearest_backward,
    aten.upsample_nearest3d.default: upsample_nearest,
    aten.upsample_nearest3d_backward.default: upsample_nearest_backward,
    aten.upsample_linear1d.default: upsample_linear,
    aten.upsample_linear1d_backward.default: upsample_linear_backward,
    aten.upsample_bilinear2d.default: upsample_linear,
    aten.upsample_bilinear2d_backward.default: upsample_linear_backward,
}
