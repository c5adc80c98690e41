"""Softmax, normalization layers, and their derivatives.

Key idea: statistics and formulas in float32 for 16-bit inputs, rounded once; float32 inputs see no conversion. The
derivatives reuse what the forward saved, as PyTorch's do.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import widen
from tpu_train.lowering.ops.dims import one_dim

aten = torch.ops.aten


def _softmax_dim(x: Array, dim: int) -> int | tuple[()]:
    return one_dim(dim, x.ndim) if x.ndim else ()


def softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    wide, axis = widen(x), _softmax_dim(x, dim)
    weights = jnp.exp(wide - jnp.max(wide, axis, keepdims=True, initial=-jnp.inf))
    result = weights / jnp.sum(weights, axis, keepdims=True)
    return result if half_to_float else result.astype(x.dtype)


def softmax_backward(grad: Array, output: Array, dim: int, input_dtype: jnp.dtype) -> Array:
    grad, out = widen(grad), widen(output)
    product = grad * out
    return (product - out * jnp.sum(product, _softmax_dim(out, dim), keepdims=True)).astype(input_dtype)


def log_softmax(x: Array, dim: int, half_to_float: bool) -> Array:
    wide, axis = widen(x), _softmax_dim(x, dim)
    shifted = wide - jnp.max(wide, axis, keepdims=True, initial=-jnp.inf)
    result = shifted - jnp.log(jnp.sum(jnp.exp(shifted), axis, keepdims=True))
    return result if half_to_float else result.astype(x.dtype)


def log_softmax_backward(grad: Array, output: Array, dim: int, input_dtype: jnp.dtype) -> Array:
    grad, out = widen(grad), widen(output)
    return (grad - jnp.exp(out) * jnp.sum(grad, _softmax_dim(out, dim), keepdims=True)).astype(input_dtype)


def _moments(x: Array, dims: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Mean, reciprocal standard deviation (both with kept dims) and the centred `x`."""
    count = math.prod(x.shape[d] for d in dims)
    average = jnp.sum(x, dims, keepdims=True) / count
    centred = x - average
    variance = jnp.sum(centred * centred, dims, keepdims=True) / count
    return average, lax.rsqrt(variance + eps), centred


def layer_norm(
    x: Array, normalized_shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    dims = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    average, rstd, centred = _moments(widen(x), dims, eps)
    out = centred * rstd
    out = out if weight is None else out * widen(weight)
    out = out if bias is None else out + widen(bias)
    statistics_dtype = x.dtype if weight is None else weight.dtype
    return out.astype(x.dtype), average.astype(statistics_dtype), rstd.astype(statistics_dtype)


def layer_norm_backward(
    grad: Array,
    x: Array,
    normalized_shape: Sequence[int],
    mean: Array,
    rstd: Array,
    weight: Array | None,
    bias: Array | None,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    outer = tuple(range(x.ndim - len(normalized_shape)))
    inner = tuple(range(len(outer), x.ndim))
    count = math.prod(normalized_shape)
    g, rstd = widen(grad), widen(rstd)
    normal = (widen(x) - widen(mean)) * rstd
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = g if weight is None else g * widen(weight)
        average = jnp.sum(scaled, inner, keepdims=True) / count
        correlation = jnp.sum(scaled * normal, inner, keepdims=True) / count
        grad_x = ((scaled - average - normal * correlation) * rstd).astype(x.dtype)
    if output_mask[1] and weight is not None:
        grad_weight = jnp.sum(g * normal, outer).astype(weight.dtype)
    if output_mask[2] and bias is not None:
        grad_bias = jnp.sum(g, outer).astype(bias.dtype)
    return grad_x, grad_weight, grad_bias


def _per_channel(vector: Array, ndim: int) -> Array:
    return widen(vector).reshape(1, -1, *(1,) * (ndim - 2))


def group_norm(
    x: Array, weight: Array | None, bias: Array | None, N: int, C: int, HxW: int, group: int, eps: float
) -> tuple[Array, Array, Array]:
    average, rstd, centred = _moments(widen(x).reshape(N, group, C // group * HxW), (2,), eps)
    out = (centred * rstd).reshape(x.shape)
    out = out if weight is None else out * _per_channel(weight, x.ndim)
    out = out if bias is None else out + _per_channel(bias, x.ndim)
    statistics_dtype = x.dtype if weight is None else weight.dtype
    return out.astype(x.dtype), average[..., 0].astype(statistics_dtype), rstd[..., 0].astype(statistics_dtype)


def group_norm_backward(
    grad: Array,
    x: Array,
    mean: Array,
    rstd: Array,
    weight: Array | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    by_group = (N, group, C // group, HxW)
    g = widen(grad).reshape(by_group)
    rstd = widen(rstd).reshape(N, group, 1, 1)
    normal = (widen(x).reshape(by_group) - widen(mean).reshape(N, group, 1, 1)) * rstd
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        scaled = g if weight is None else g * widen(weight).reshape(1, group, C // group, 1)
        count = C // group * HxW
        average = jnp.sum(scaled, (2, 3), keepdims=True) / count
        correlation = jnp.sum(scaled * normal, (2, 3), keepdims=True) / count
        grad_x = ((scaled - average - normal * correlation) * rstd).reshape(x.shape).astype(x.dtype)
    parameter_dtype = grad.dtype if weight is None else weight.dtype
    if output_mask[1]:
        grad_weight = jnp.sum(g * normal, (0, 3)).reshape(C).astype(parameter_dtype)
    if output_mask[2]:
        grad_bias = jnp.sum(g, (0, 3)).reshape(C).astype(parameter_dtype)
    return grad_x, grad_weight, grad_bias


def batch_norm(
    x: Array,
    weight: Array | None,
    bias: Array | None,
    running_mean: Array | None,
    running_var: Array | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Array, Array, Array]:
    wide = widen(x)
    if training:
        if running_mean is not None:
            raise ValueError(
                "aten::native_batch_norm in training with running statistics, which it would have to update in place: "
                "allowed are track_running_stats=False, or eval()"
            )
        average, rstd, centred = _moments(wide, (0, *range(2, x.ndim)), eps)
        out, saved = centred * rstd, (average.reshape(-1), rstd.reshape(-1))
    else:
        assert running_mean is not None
        assert running_var is not None
        scale = lax.rsqrt(_per_channel(running_var, x.ndim) + eps)
        out, saved = (wide - _per_channel(running_mean, x.ndim)) * scale, (jnp.zeros((0,), wide.dtype),) * 2
    out = out if weight is None else out * _per_channel(weight, x.ndim)
    out = out if bias is None else out + _per_channel(bias, x.ndim)
    statistics_dtype = x.dtype if weight is None else weight.dtype
    return out.astype(x.dtype), saved[0].astype(statistics_dtype), saved[1].astype(statistics_dtype)


OPS: dict[Any, Callable[..., Any]] = {
    aten._softmax.default: softmax,
    aten._softmax_backward_data.default: softmax_backward,
    aten._log_softmax.default: log_softmax,
    aten._log_softmax_backward_data.default: log_softmax_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.native_batch_norm.default: batch_norm,
}
