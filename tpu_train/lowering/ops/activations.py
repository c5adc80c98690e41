"""Activations and their derivatives.

Key idea: 16-bit inputs are calculated in float32 and rounded once; float32 inputs see no conversion. Derivatives follow
derivatives.yaml and the CPU kernels, for nan and at the kinks too.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import promote, promote_float, widen
from tpu_train.lowering.ops.dims import one_dim

aten = torch.ops.aten


def _wide(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` of float tensors, calculated in their `compute_dtype` and returned in the common dtype."""

    def entry(*tensors: Array, **kwargs: Any) -> Array:
        tensors = tuple(promote_float(*tensors))
        return function(*map(widen, tensors), **kwargs).astype(tensors[0].dtype)

    return entry


@_wide
def sigmoid(x: Array) -> Array:
    return lax.logistic(x)


@_wide
def sigmoid_backward(grad: Array, output: Array) -> Array:
    return grad * output * (1 - output)


@_wide
def tanh(x: Array) -> Array:
    return jnp.tanh(x)


@_wide
def tanh_backward(grad: Array, output: Array) -> Array:
    return grad * (1 - output * output)


def relu(x: Array) -> Array:
    return jnp.maximum(x, jnp.zeros((), x.dtype))


def threshold(x: Array, threshold: float, value: float) -> Array:
    return jnp.where(x <= threshold, jnp.asarray(value, x.dtype), x)


def threshold_backward(grad: Array, x: Array, threshold: float) -> Array:
    grad, x = promote(grad, x)
    return jnp.where(x <= threshold, jnp.zeros((), grad.dtype), grad)


@_wide
def silu(x: Array) -> Array:
    return x * lax.logistic(x)


@_wide
def silu_backward(grad: Array, x: Array) -> Array:
    gate = lax.logistic(x)
    return grad * gate * (1 + x * (1 - gate))


_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715  # Hendrycks and Gimpel, arXiv:1606.08415, section 2


@_wide
def gelu(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "none":
        return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))
    return 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x)))


@_wide
def gelu_backward(grad: Array, x: Array, *, approximate: str = "none") -> Array:
    if approximate == "none":
        cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
        pdf = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        return grad * (cdf + x * pdf)
    inner = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
    slope = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
    return grad * (0.5 * (1 + inner) + 0.5 * x * (1 - inner * inner) * slope)


def hardtanh(x: Array, min_val: float = -1, max_val: float = 1) -> Array:
    low, high = jnp.asarray(min_val, x.dtype), jnp.asarray(max_val, x.dtype)
    return jnp.minimum(jnp.maximum(x, low), high)


def hardtanh_backward(grad: Array, x: Array, min_val: float, max_val: float) -> Array:
    return jnp.where((x <= min_val) | (x >= max_val), jnp.zeros((), grad.dtype), grad)


@_wide
def hardsigmoid(x: Array) -> Array:
    return jnp.clip(x + 3, 0, 6) / 6


@_wide
def hardsigmoid_backward(grad: Array, x: Array) -> Array:
    return jnp.where((x > -3) & (x < 3), grad / 6, 0)


@_wide
def hardswish(x: Array) -> Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


@_wide
def hardswish_backward(grad: Array, x: Array) -> Array:
    # The middle branch holds at neither end: PyTorch's kernel compares with <= -3 and < 3.
    return jnp.where(x <= -3, 0, jnp.where(x < 3, grad * (x / 3 + 0.5), grad))


def leaky_relu(x: Array, negative_slope: float = 0.01) -> Array:
    return jnp.where(x > 0, x, (widen(x) * negative_slope).astype(x.dtype))


def leaky_relu_backward(grad: Array, x: Array, negative_slope: float, self_is_result: bool) -> Array:
    # The result has the sign of the input for every slope that autograd lets through, so `x` may be either.
    return jnp.where(x > 0, grad, (widen(grad) * negative_slope).astype(grad.dtype))


def elu(x: Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Array:
    wide = widen(x)
    negative = jnp.expm1(jnp.minimum(wide, 0) * input_scale) * (alpha * scale)
    return jnp.where(wide > 0, wide * scale, negative).astype(x.dtype)


def elu_backward(
    grad: Array, alpha: float, scale: float, input_scale: float, is_result: bool, self_or_result: Array
) -> Array:
    g, x = widen(grad), widen(self_or_result)
    if is_result:
        negative = g * input_scale * (x + alpha * scale)
    else:
        negative = g * (input_scale * alpha * scale) * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, negative, g * scale).astype(grad.dtype)


def softplus(x: Array, beta: float = 1, threshold: float = 20) -> Array:
    wide = widen(x)
    scaled = wide * beta
    return jnp.where(scaled > threshold, wide, jnp.log1p(jnp.exp(scaled)) / beta).astype(x.dtype)


def softplus_backward(grad: Array, x: Array, beta: float, threshold: float) -> Array:
    g, scaled = widen(grad), widen(x) * beta
    return jnp.where(scaled > threshold, g, g * lax.logistic(scaled)).astype(grad.dtype)


def log_sigmoid(x: Array) -> tuple[Array, Array]:
    wide = widen(x)
    small = jnp.exp(-jnp.abs(wide))
    # The CPU kernel hands its exp(-|x|) to the backward; the derivative below does not read it.
    return (jnp.minimum(wide, 0) - jnp.log1p(small)).astype(x.dtype), small.astype(x.dtype)


def log_sigmoid_backward(grad: Array, x: Array, buffer: Array) -> Array:
    return (widen(grad) * lax.logistic(-widen(x))).astype(grad.dtype)


@_wide
def mish(x: Array) -> Array:
    return x * jnp.tanh(jax.nn.softplus(x))


@_wide
def mish_backward(grad: Array, x: Array) -> Array:
    inner = jnp.tanh(jax.nn.softplus(x))
    return grad * (inner + x * lax.logistic(x) * (1 - inner * inner))


def glu(x: Array, dim: int = -1) -> Array:
    a, b = jnp.split(widen(x), 2, one_dim(dim, x.ndim))
    return (a * lax.logistic(b)).astype(x.dtype)


def glu_backward(grad: Array, x: Array, dim: int) -> Array:
    dim = one_dim(dim, x.ndim)
    g = widen(grad)
    a, b = jnp.split(widen(x), 2, dim)
    gate = lax.logistic(b)
    return jnp.concatenate([g * gate, g * a * gate * (1 - gate)], dim).astype(grad.dtype)


def prelu(x: Array, weight: Array) -> Array:
    return jnp.where(x > 0, x, weight * x)


def prelu_backward(grad: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    positive = x > 0
    return jnp.where(positive, grad, weight * grad), jnp.where(positive, jnp.zeros((), x.dtype), x * grad)


def shrink_backward(grad: Array, x: Array, lambd: float) -> Array:
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros((), grad.dtype), grad)


OPS: dict[Any, Callable[..., Any]] = {
    aten.sigmoid.default: sigmoid,
    aten.sigmoid_backward.default: sigmoid_backward,
    aten.tanh.default: tanh,
    aten.tanh_backward.default: tanh_backward,
    aten.relu.default: relu,
    aten.threshold.default: threshold,
    aten.threshold_backward.default: threshold_backward,
    aten.silu.default: silu,
    aten.silu_backward.default: silu_backward,
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.hardtanh.default: hardtanh,
    aten.hardtanh_backward.default: hardtanh_backward,
    aten.hardsigmoid.default: hardsigmoid,
    aten.hardsigmoid_backward.default: hardsigmoid_backward,
    aten.hardswish.default: hardswish,
    aten.hardswish_backward.default: hardswish_backward,
    aten.leaky_relu.default: leaky_relu,
    aten.leaky_relu_backward.default: leaky_relu_backward,
    aten.elu.default: elu,
    aten.elu_backward.default: elu_backward,
    aten.softplus.default: softplus,
    aten.softplus_backward.default: softplus_backward,
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten.mish.default: mish,
    aten.mish_backward.default: mish_backward,
    aten.glu.default: glu,
    aten.glu_backward.default: glu_backward,
    aten.hardshrink_backward.default: shrink_backward,
    aten.softshrink_backward.default: shrink_backward,
    aten._prelu_kernel.default: prelu,
    aten._prelu_kernel_backward.default: prelu_backward,
}
