"""Reductions, scans along a dimension, sorting.

Key idea: PyTorch reduces integers and booleans into int64 and 16-bit floats through float32; nan wins every maximum and
minimum and sorts last. `jnp` agrees with the floats' part; the dtypes are set here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import jax_dtype, promote_float, widen
from tpu_train.lowering.ops.dims import many_dims, one_dim

aten = torch.ops.aten

Dims = int | Sequence[int] | None


def _index_dtype() -> jnp.dtype:
    return jax_dtype(torch.int64)


def _accumulated_dtype(x: Array, dtype: jnp.dtype | None) -> jnp.dtype:
    """The dtype of a sum or product: int64 for integers and booleans."""
    if dtype is not None:
        return dtype
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else _index_dtype()


def sum_(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: jnp.dtype | None = None) -> Array:
    dtype = _accumulated_dtype(x, dtype)
    wide = widen(x.astype(dtype))
    # Given a dtype, jnp adds in it, 16 bits or not; so it is given the wide one.
    return jnp.sum(wide, many_dims(dim, x.ndim), wide.dtype, keepdims=keepdim).astype(dtype)


def nansum(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: jnp.dtype | None = None) -> Array:
    return sum_(jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x), dim, keepdim, dtype=dtype)


def mean(x: Array, dim: Dims = None, keepdim: bool = False, *, dtype: jnp.dtype | None = None) -> Array:
    dims = many_dims(dim, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    wide = widen(x if dtype is None else x.astype(dtype))
    total = jnp.sum(wide, dims, keepdims=keepdim)
    # Dividing by 0 in float gives nan for an empty mean, as PyTorch does.
    return (total / jnp.asarray(count, total.dtype)).astype(x.dtype if dtype is None else dtype)


def prod(x: Array, dim: int | None = None, keepdim: bool = False, *, dtype: jnp.dtype | None = None) -> Array:
    dims = None if dim is None else many_dims(dim, x.ndim)
    dtype = _accumulated_dtype(x, dtype)
    wide = widen(x.astype(dtype))
    return jnp.prod(wide, dims, wide.dtype, keepdims=keepdim).astype(dtype)


def prod_all(x: Array, *, dtype: jnp.dtype | None = None) -> Array:
    return prod(x, dtype=dtype)


def amax(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.max(x, many_dims(dim, x.ndim), keepdims=keepdim)


def amin(x: Array, dim: Dims = (), keepdim: bool = False) -> Array:
    return jnp.min(x, many_dims(dim, x.ndim), keepdims=keepdim)


def max_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return amax(x, dim, keepdim), argmax(x, dim, keepdim)


def min_dim(x: Array, dim: int, keepdim: bool = False) -> tuple[Array, Array]:
    return amin(x, dim, keepdim), argmin(x, dim, keepdim)


def argmax(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _arg_extreme(lax.argmax, x, dim, keepdim)


def argmin(x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    return _arg_extreme(lax.argmin, x, dim, keepdim)


def _arg_extreme(function: Callable[..., Array], x: Array, dim: int | None, keepdim: bool) -> Array:
    """The first index of the extreme value; the first nan if there is one."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    if x.ndim == 0:
        return jnp.zeros((), _index_dtype())
    if dim is None:
        index = function(x.reshape(-1), 0, _index_dtype())
        return index.reshape((1,) * x.ndim) if keepdim else index
    dim = one_dim(dim, x.ndim)
    index = function(x, dim, _index_dtype())
    return jnp.expand_dims(index, dim) if keepdim else index


def _truth(function: Callable[..., Array], x: Array, dim: Dims, keepdim: bool) -> Array:
    result = function(x.astype(jnp.bool_), axis=dim, keepdims=keepdim)
    return result.astype(jnp.uint8) if x.dtype == jnp.uint8 else result  # uint8 was PyTorch's boolean once


def any_(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return _truth(jnp.any, x, _truth_dims(dim, x.ndim), keepdim)


def all_(x: Array, dim: Dims = None, keepdim: bool = False) -> Array:
    return _truth(jnp.all, x, _truth_dims(dim, x.ndim), keepdim)


def _truth_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """Unlike the other reductions, any and all take an empty list to mean no dimension."""
    return () if dim is not None and not isinstance(dim, int) and not dim else many_dims(dim, ndim)


def var(x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Array:
    return var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def var_mean(
    x: Array, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Array, Array]:
    dims = many_dims(dim, x.ndim)
    count = math.prod(x.shape[d] for d in dims)
    wide = widen(x)
    average = jnp.sum(wide, dims, keepdims=True) / jnp.asarray(count, wide.dtype)
    squares = jnp.sum(jnp.square(wide - average), dims, keepdims=keepdim)
    freedom = max(0, count - (1 if correction is None else correction))
    variance = squares / jnp.asarray(freedom, wide.dtype)
    return variance.astype(x.dtype), average.reshape(variance.shape).astype(x.dtype)


def vector_norm(
    x: Array, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: jnp.dtype | None = None
) -> Array:
    out_dtype = x.dtype if dtype is None else dtype
    dims = many_dims(dim, x.ndim)
    wide = widen(x.astype(out_dtype))
    if ord == 2:
        result = jnp.sqrt(jnp.sum(wide * wide, dims, keepdims=keepdim))
    elif math.isinf(ord):
        reduce = jnp.max if ord > 0 else jnp.min
        initial = 0 if ord > 0 else None
        result = reduce(jnp.abs(wide), dims, keepdims=keepdim, initial=initial)
    elif ord == 0:
        result = jnp.sum(wide != 0, dims, wide.dtype, keepdims=keepdim)
    elif ord == 1:
        result = jnp.sum(jnp.abs(wide), dims, keepdims=keepdim)
    else:
        result = jnp.sum(jnp.abs(wide) ** ord, dims, keepdims=keepdim) ** (1 / ord)
    return result.astype(out_dtype)


def logsumexp(x: Array, dim: Dims, keepdim: bool = False) -> Array:
    (x,) = promote_float(x)
    dims = many_dims(dim, x.ndim)
    wide = widen(x)
    top = jnp.max(wide, dims, keepdims=True, initial=-jnp.inf)
    top = jnp.where(jnp.isinf(top), 0, top)  # inf - inf would be nan
    total = jnp.log(jnp.sum(jnp.exp(wide - top), dims, keepdims=keepdim))
    return (total + top.reshape(total.shape)).astype(x.dtype)


def cumsum(x: Array, dim: int, *, dtype: jnp.dtype | None = None) -> Array:
    return _scan(jnp.cumsum, x, dim, _accumulated_dtype(x, dtype))


def cumprod(x: Array, dim: int, *, dtype: jnp.dtype | None = None) -> Array:
    return _scan(jnp.cumprod, x, dim, _accumulated_dtype(x, dtype))


def _scan(function: Callable[..., Array], x: Array, dim: int, dtype: jnp.dtype) -> Array:
    x = x.astype(dtype)
    return x if x.ndim == 0 else function(widen(x), axis=dim).astype(dtype)


def logcumsumexp(x: Array, dim: int) -> Array:
    return x if x.ndim == 0 else lax.cumlogsumexp(widen(x), one_dim(dim, x.ndim)).astype(x.dtype)


def sort(x: Array, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return _sort(x, dim, descending)


def sort_stable(x: Array, *, stable: bool | None, dim: int = -1, descending: bool = False) -> tuple[Array, Array]:
    return _sort(x, dim, descending)


def _sort(x: Array, dim: int, descending: bool) -> tuple[Array, Array]:
    """Always stable. A descending sort is an ascending one of the reversed tensor, reversed: stable too, nan first."""
    if x.ndim == 0:
        return x, jnp.zeros((), _index_dtype())
    dim = one_dim(dim, x.ndim)
    index = lax.broadcasted_iota(_index_dtype(), x.shape, dim)
    keys = [lax.rev(operand, [dim]) for operand in (x, index)] if descending else [x, index]
    values, index = lax.sort(keys, dimension=dim, is_stable=True, num_keys=1)
    return (lax.rev(values, [dim]), lax.rev(index, [dim])) if descending else (values, index)


def topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), _index_dtype())
    dim = one_dim(dim, x.ndim)
    if not largest:
        return tuple(lax.slice_in_dim(part, 0, k, axis=dim) for part in _sort(x, dim, descending=False))  # type: ignore[return-value]
    values, index = lax.top_k(jnp.moveaxis(x, dim, -1), k)
    return jnp.moveaxis(values, -1, dim), jnp.moveaxis(index, -1, dim).astype(_index_dtype())


OPS: dict[Any, Callable[..., Any]] = {
    aten.sum.default: sum_,
    aten.sum.dim_IntList: sum_,
    aten.nansum.default: nansum,
    aten.mean.default: mean,
    aten.mean.dim: mean,
    aten.prod.default: prod_all,
    aten.prod.dim_int: prod,
    aten.amax.default: amax,
    aten.amin.default: amin,
    aten.max.default: amax,
    aten.min.default: amin,
    aten.max.dim: max_dim,
    aten.min.dim: min_dim,
    aten.argmax.default: argmax,
    aten.argmin.default: argmin,
    aten.any.default: any_,
    aten.any.dim: any_,
    aten.any.dims: any_,
    aten.all.default: all_,
    aten.all.dim: all_,
    aten.all.dims: all_,
    aten.var.correction: var,
    aten.var_mean.correction: var_mean,
    aten.linalg_vector_norm.default: vector_norm,
    aten.logsumexp.default: logsumexp,
    aten.cumsum.default: cumsum,
    aten.cumprod.default: cumprod,
    aten.logcumsumexp.default: logcumsumexp,
    aten.sort.default: sort,
    aten.sort.stable: sort_stable,
    aten.topk.default: topk,
}
