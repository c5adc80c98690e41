"""Pointwise arithmetic: binary and unary functions, comparisons, bit and logic ops, rounding, selection, copies.

Key idea: operands are promoted by PyTorch's rule first; a formula of several steps on 16-bit floats is calculated in
float32 and rounded once, as PyTorch's kernels do.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import Operand, promote, promote_float, result_dtype, widen

aten = torch.ops.aten


def _unary_float(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function whose integer input gives a float result."""

    def entry(x: Array) -> Array:
        (x,) = promote_float(x)
        return function(x)

    return entry


def _unary_float_only(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A rounding function: integers come back as they are."""

    def entry(x: Array) -> Array:
        return function(x) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return entry


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Operand, Operand], Array]:
    def entry(x: Operand, y: Operand) -> Array:
        x, y = promote(x, y)
        return function(x, y)

    return entry


def _with_number(function: Callable[[Array, Array], Array], x: Operand, y: Operand) -> Array:
    """`function` in the promoted dtype; a number beside 16-bit floats is not rounded to 16 bits first."""
    dtype = result_dtype(x, y)
    if dtype in (jnp.bfloat16, jnp.float16) and not (isinstance(x, Array) and isinstance(y, Array)):
        return function(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)).astype(dtype)
    return function(jnp.asarray(x, dtype), jnp.asarray(y, dtype))


def add(x: Operand, y: Operand, *, alpha: float = 1) -> Array:
    if alpha == 1:
        return _with_number(lax.bitwise_or if result_dtype(x, y) == jnp.bool_ else jnp.add, x, y)
    return _scaled_add(x, y, alpha)


def sub(x: Operand, y: Operand, *, alpha: float = 1) -> Array:
    if alpha == 1:
        return _with_number(jnp.subtract, x, y)
    return _scaled_add(x, y, -alpha)


def rsub(x: Operand, y: Operand, *, alpha: float = 1) -> Array:
    return sub(y, x, alpha=alpha)


def _scaled_add(x: Operand, y: Operand, alpha: float) -> Array:
    x, y = promote(x, y)
    if x.dtype == jnp.bool_:
        return x | (y & bool(alpha))
    return (widen(x) + widen(y) * alpha).astype(x.dtype)


def mul(x: Operand, y: Operand) -> Array:
    return _with_number(jnp.multiply, x, y)


def div(x: Operand, y: Operand, *, rounding_mode: str | None = None) -> Array:
    if rounding_mode is None:
        dtype = result_dtype(x, y)
        if jnp.issubdtype(dtype, jnp.floating):
            return _with_number(jnp.divide, x, y)
        x, y = promote_float(x, y)
        return x / y
    return _divide_floor(x, y) if rounding_mode == "floor" else _divide_trunc(x, y)


def _divide_trunc(x: Operand, y: Operand) -> Array:
    x, y = promote(x, y)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return lax.div(*jnp.broadcast_arrays(x, y))
    return jnp.trunc((widen(x) / widen(y)).astype(x.dtype))  # PyTorch rounds the quotient to 16 bits first


def _divide_floor(x: Operand, y: Operand) -> Array:
    x, y = promote(x, y)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.floor_divide(x, y)
    # c10/util/generic_math.h, div_floor_floating: exact multiples do not fall to the integer below.
    dtype, x, y = x.dtype, widen(x), widen(y)
    mod = jnp.fmod(x, y)
    quotient = (x - mod) / y
    quotient = jnp.where((mod != 0) & ((y < 0) != (mod < 0)), quotient - 1, quotient)
    floor = jnp.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    floor = jnp.where(quotient == 0, jnp.copysign(0.0, x / y), floor)
    return jnp.where(y == 0, x / y, floor).astype(dtype)


def fmod(x: Operand, y: Operand) -> Array:
    return _with_number(jnp.fmod, x, y)


def remainder(x: Operand, y: Operand) -> Array:
    return _with_number(_remainder, x, y)


def _remainder(x: Array, y: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.remainder(x, y)
    # Not jnp.remainder, which rounds 16-bit floats between its steps.
    dtype, x, y = x.dtype, widen(x), widen(y)
    mod = jnp.fmod(x, y)
    return jnp.where((mod != 0) & ((y < 0) != (mod < 0)), mod + y, mod).astype(dtype)


def pow_scalar(x: Array, exponent: float) -> Array:
    dtype = result_dtype(x, exponent)
    x = jnp.asarray(x, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        return _float_power(widen(x), float(exponent)).astype(dtype)
    return lax.integer_pow(x, int(exponent))


def _float_power(x: Array, exponent: float) -> Array:
    if exponent == 0.5:
        return jnp.sqrt(x)
    if exponent == -0.5:
        return lax.rsqrt(x)
    if exponent.is_integer() and abs(exponent) <= 16:  # products: more exact and faster than exp(log)
        return lax.integer_pow(x, int(exponent)) if exponent != 1 else x
    return jnp.power(x, exponent)


def pow_tensor(x: Operand, y: Operand) -> Array:
    x, y = promote(x, y)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.power(widen(x), widen(y)).astype(x.dtype)
    # A negative integer exponent: 1 and -1 have integer inverses, all else truncates to 0.
    parity = jnp.where(y % 2 == 0, jnp.ones_like(x), x)
    inverse = jnp.where(jnp.abs(x) == 1, parity, jnp.zeros_like(x))
    return jnp.where(y < 0, inverse, jnp.power(x, jnp.maximum(y, 0)))


def logical(function: Callable[..., Array]) -> Callable[..., Array]:
    def entry(*operands: Array) -> Array:
        return function(*(x.astype(jnp.bool_) for x in operands))

    return entry


def sign(x: Array) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x if x.dtype == jnp.bool_ else jnp.sign(x)
    # nan compares false with everything, so its sign is 0; jnp.sign would return nan.
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def reciprocal(x: Array) -> Array:
    (x,) = promote_float(x)
    return 1 / x


def absolute(x: Array) -> Array:
    return x if x.dtype == jnp.bool_ else jnp.abs(x)


def round_decimals(x: Array, *, decimals: int) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    scale = 10.0 ** abs(decimals)
    wide = widen(x)
    result = jnp.round(wide * scale) / scale if decimals > 0 else jnp.round(wide / scale) * scale
    return result.astype(x.dtype)


def digamma(x: Array) -> Array:
    (x,) = promote_float(x)
    return jnp.where(x == 0, jnp.copysign(jnp.inf, -x), lax.digamma(x)).astype(x.dtype)


def frac(x: Array) -> Array:
    return x - jnp.trunc(x)


def heaviside(x: Array, values: Array) -> Array:
    x, values = promote(x, values)
    return jnp.where(x == 0, values, (x > 0).astype(x.dtype))


def xlogy(x: Operand, y: Operand) -> Array:
    x, y = promote_float(x, y)
    product = jnp.where(x == 0, jnp.zeros_like(x), x * jnp.log(y))
    return jnp.where(jnp.isnan(y), y, product)


def logaddexp(x: Array, y: Array) -> Array:
    x, y = promote_float(x, y)
    return jnp.logaddexp(x, y)


def where(condition: Array, x: Array, y: Array) -> Array:
    x, y = promote(x, y)
    return jnp.where(condition.astype(jnp.bool_), x, y)


def clamp(x: Array, min: Operand | None = None, max: Operand | None = None) -> Array:
    bounds = [bound for bound in (min, max) if bound is not None]
    dtype = result_dtype(x, *bounds)
    x = jnp.asarray(x, dtype)
    # In this order: where min > max PyTorch returns max. nan propagates from every operand.
    if min is not None:
        x = jnp.maximum(x, jnp.asarray(min, dtype))
    if max is not None:
        x = jnp.minimum(x, jnp.asarray(max, dtype))
    return x


def clamp_min(x: Array, min: Operand) -> Array:
    return clamp(x, min)


def clamp_max(x: Array, max: Operand) -> Array:
    return clamp(x, None, max)


def nan_to_num(x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


def lerp(start: Array, end: Array, weight: Operand) -> Array:
    dtype = result_dtype(start, end)
    start, end = widen(jnp.asarray(start, dtype)), widen(jnp.asarray(end, dtype))
    if isinstance(weight, Array):
        weight = widen(weight)
        # Counted from the nearer end, so that weights 0 and 1 are exact.
        near = start + weight * (end - start)
        far = end - (end - start) * (1 - weight)
        return jnp.where(jnp.abs(weight) < 0.5, near, far).astype(dtype)
    if abs(weight) < 0.5:
        return (start + weight * (end - start)).astype(dtype)
    return (end - (end - start) * (1 - weight)).astype(dtype)


def addcmul(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    dtype = result_dtype(x, a, b)
    x, a, b = (widen(jnp.asarray(operand, dtype)) for operand in (x, a, b))
    return (x + (a * b if value == 1 else value * a * b)).astype(dtype)


def addcdiv(x: Array, a: Array, b: Array, *, value: float = 1) -> Array:
    dtype = result_dtype(x, a, b)
    x, a, b = (widen(jnp.asarray(operand, dtype)) for operand in (x, a, b))
    return (x + (a / b if value == 1 else value * (a / b))).astype(dtype)


def masked_fill(x: Array, mask: Array, value: Operand) -> Array:
    return jnp.where(mask, jnp.asarray(value).astype(x.dtype), x)


def to_copy(x: Array, *, dtype: jnp.dtype | None = None) -> Array:
    return x if dtype is None else x.astype(dtype)


def copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(source.astype(x.dtype), x.shape)


def identity(x: Array) -> Array:
    return x


def fill(x: Array, value: Operand) -> Array:
    return jnp.broadcast_to(jnp.asarray(value).astype(x.dtype), x.shape)


_BINARY_NUMBER: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: add,
    aten.add.Scalar: add,
    aten.sub.Tensor: sub,
    aten.sub.Scalar: sub,
    aten.rsub.Tensor: rsub,
    aten.rsub.Scalar: rsub,
    aten.mul.Tensor: mul,
    aten.mul.Scalar: mul,
    aten.div.Tensor: div,
    aten.div.Scalar: div,
    aten.div.Tensor_mode: div,
    aten.div.Scalar_mode: div,
    aten.floor_divide.default: _divide_floor,
    aten.fmod.Tensor: fmod,
    aten.fmod.Scalar: fmod,
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.pow.Tensor_Scalar: pow_scalar,
    aten.pow.Tensor_Tensor: pow_tensor,
    aten.pow.Scalar: pow_tensor,
    aten.atan2.default: lambda x, y: jnp.arctan2(*promote_float(x, y)),
    aten.hypot.default: _binary(jnp.hypot),
    aten.copysign.Tensor: lambda x, y: jnp.copysign(*promote_float(x, y)),
    aten.copysign.Scalar: lambda x, y: jnp.copysign(*promote_float(x, y)),
    aten.maximum.default: _binary(jnp.maximum),
    aten.minimum.default: _binary(jnp.minimum),
    aten.fmax.default: _binary(jnp.fmax),
    aten.fmin.default: _binary(jnp.fmin),
    aten.heaviside.default: heaviside,
    aten.xlogy.Tensor: xlogy,
    aten.logaddexp.default: logaddexp,
}

_COMPARISONS: dict[Any, Callable[..., Any]] = {
    overload: _binary(function)
    for packet, function in (
        (aten.eq, jnp.equal),
        (aten.ne, jnp.not_equal),
        (aten.lt, jnp.less),
        (aten.le, jnp.less_equal),
        (aten.gt, jnp.greater),
        (aten.ge, jnp.greater_equal),
    )
    for overload in (packet.Tensor, packet.Scalar)
}

_BITS: dict[Any, Callable[..., Any]] = {
    aten.bitwise_and.Tensor: _binary(jnp.bitwise_and),
    aten.bitwise_and.Scalar: _binary(jnp.bitwise_and),
    aten.bitwise_or.Tensor: _binary(jnp.bitwise_or),
    aten.bitwise_or.Scalar: _binary(jnp.bitwise_or),
    aten.bitwise_xor.Tensor: _binary(jnp.bitwise_xor),
    aten.bitwise_xor.Scalar: _binary(jnp.bitwise_xor),
    aten.bitwise_not.default: jnp.bitwise_not,
    aten.bitwise_left_shift.Tensor: _binary(jnp.left_shift),
    aten.bitwise_left_shift.Tensor_Scalar: _binary(jnp.left_shift),
    aten.bitwise_right_shift.Tensor: _binary(jnp.right_shift),
    aten.bitwise_right_shift.Tensor_Scalar: _binary(jnp.right_shift),
    aten.logical_and.default: logical(jnp.logical_and),
    aten.logical_or.default: logical(jnp.logical_or),
    aten.logical_xor.default: logical(jnp.logical_xor),
    aten.logical_not.default: logical(jnp.logical_not),
}

_UNARY: dict[Any, Callable[..., Any]] = {
    aten.abs.default: absolute,
    aten.neg.default: jnp.negative,
    aten.sign.default: sign,
    aten.sgn.default: sign,
    aten.reciprocal.default: reciprocal,
    aten.sqrt.default: _unary_float(jnp.sqrt),
    aten.rsqrt.default: _unary_float(lax.rsqrt),
    aten.exp.default: _unary_float(jnp.exp),
    aten.exp2.default: _unary_float(jnp.exp2),
    aten.expm1.default: _unary_float(jnp.expm1),
    aten.log.default: _unary_float(jnp.log),
    aten.log2.default: _unary_float(jnp.log2),
    aten.log10.default: _unary_float(jnp.log10),
    aten.log1p.default: _unary_float(jnp.log1p),
    aten.sin.default: _unary_float(jnp.sin),
    aten.cos.default: _unary_float(jnp.cos),
    aten.tan.default: _unary_float(jnp.tan),
    aten.asin.default: _unary_float(jnp.arcsin),
    aten.acos.default: _unary_float(jnp.arccos),
    aten.atan.default: _unary_float(jnp.arctan),
    aten.sinh.default: _unary_float(jnp.sinh),
    aten.cosh.default: _unary_float(jnp.cosh),
    aten.asinh.default: _unary_float(jnp.arcsinh),
    aten.acosh.default: _unary_float(jnp.arccosh),
    aten.atanh.default: _unary_float(jnp.arctanh),
    aten.erf.default: _unary_float(lax.erf),
    aten.erfc.default: _unary_float(lax.erfc),
    aten.erfinv.default: _unary_float(lax.erf_inv),
    aten.lgamma.default: _unary_float(lax.lgamma),
    aten.digamma.default: digamma,
    aten.sinc.default: _unary_float(jnp.sinc),
    aten.floor.default: _unary_float_only(jnp.floor),
    aten.ceil.default: _unary_float_only(jnp.ceil),
    aten.trunc.default: _unary_float_only(jnp.trunc),
    aten.round.default: _unary_float_only(jnp.round),
    aten.round.decimals: round_decimals,
    aten.frac.default: frac,
    aten.isnan.default: jnp.isnan,
    aten.isinf.default: jnp.isinf,
    aten.nan_to_num.default: nan_to_num,
}

OPS: dict[Any, Callable[..., Any]] = {
    **_BINARY_NUMBER,
    **_COMPARISONS,
    **_BITS,
    **_UNARY,
    aten.where.self: where,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min.default: clamp_min,
    aten.clamp_min.Tensor: clamp_min,
    aten.clamp_max.default: clamp_max,
    aten.clamp_max.Tensor: clamp_max,
    aten.lerp.Scalar: lerp,
    aten.lerp.Tensor: lerp,
    aten.addcmul.default: addcmul,
    aten.addcdiv.default: addcdiv,
    aten.masked_fill.Scalar: masked_fill,
    aten.masked_fill.Tensor: masked_fill,
    aten._to_copy.default: to_copy,
    aten.copy.default: copy,
    aten.fill.Scalar: fill,
    aten.fill.Tensor: fill,
    aten.clone.default: identity,
    aten.detach.default: identity,
    aten.alias.default: identity,
    aten.lift_fresh_copy.default: identity,
    aten.lift_fresh.default: identity,
}
