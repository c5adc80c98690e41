"""Reading and writing at indices that are data: gather, scatter, embedding, `x[i, j]`.

Key idea: indices are promised to be in bounds, which spares a comparison and a select per element. PyTorch raises for
an index out of bounds; a compiled program cannot, and reads clamped or drops the write. Only `index` and `index_put`
take negative indices, as in PyTorch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import Operand, compute_dtype, jax_dtype, result_dtype, widen
from tpu_train.lowering.ops.dims import one_dim

aten = torch.ops.aten

_IN_BOUNDS: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


def embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    # PyTorch raises for a row that is not there; a program cannot, so it gives nan, which the finiteness check sees.
    return weight.at[indices].get(mode="fill", wrap_negative_indices=False)


def embedding_dense_backward(
    grad: Array, indices: Array, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Array:
    if scale_grad_by_freq:
        raise ValueError("aten::embedding_dense_backward with scale_grad_by_freq=True: allowed is False")
    if padding_idx >= 0:
        indices = jnp.where(indices == padding_idx, num_weights, indices)  # out of bounds: dropped
    # Thousands of tokens may add up in one row: too many for 16 bits.
    table = jnp.zeros((num_weights, grad.shape[-1]), compute_dtype(grad.dtype))
    table = table.at[indices].add(grad.astype(table.dtype), mode="drop", wrap_negative_indices=False)
    return table.astype(grad.dtype)


def _crop(x: Array, shape: Sequence[int], keep: int | None = None) -> Array:
    """`x` cut to `shape` from the start of each dimension, `keep` excepted."""
    limits = [length if dim == keep else shape[dim] for dim, length in enumerate(x.shape)]
    return lax.slice(x, [0] * x.ndim, limits)


def gather(x: Array, dim: int, index: Array, *, sparse_grad: bool = False) -> Array:
    if index.size == 0:
        return jnp.zeros(index.shape, x.dtype)
    if x.ndim == 0 or index.ndim == 0:
        # PyTorch lets 0-d tensors stand for tensors of one element here.
        return x.reshape(-1).at[index].get(**_IN_BOUNDS)
    dim = one_dim(dim, x.ndim)
    return jnp.take_along_axis(_crop(x, index.shape, keep=dim), index, dim, mode="promise_in_bounds")


def _grid(index: Array, dim: int) -> tuple[Array, ...]:
    """One index array per dimension: `index` along `dim`, its own position along the others."""
    return tuple(index if d == dim else lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim))


def _scatter(x: Array, dim: int, index: Array, source: Operand, method: str) -> Array:
    if index.size == 0:
        return x
    shape = x.shape
    if x.ndim == 0 or index.ndim == 0:
        x, index = x.reshape(-1), index.reshape(-1)
        source = source.reshape(-1) if isinstance(source, Array) else source
    dim = one_dim(dim, x.ndim)
    source = (_crop(source, index.shape) if isinstance(source, Array) else jnp.asarray(source)).astype(x.dtype)
    target = x.at[_grid(index, dim)]
    return getattr(target, method)(source, **_IN_BOUNDS).reshape(shape)


def scatter(x: Array, dim: int, index: Array, source: Operand) -> Array:
    return _scatter(x, dim, index, source, "set")


def scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    return _scatter(widen(x), dim, index, source, "add").astype(x.dtype)


_REDUCE_METHODS = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def scatter_reduce(x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True) -> Array:
    if reduce not in _REDUCE_METHODS:
        allowed = ", ".join(_REDUCE_METHODS)
        raise ValueError(f"aten::scatter_reduce.two with reduce={reduce!r}: allowed are {allowed}")
    wide = widen(x) if reduce in ("sum", "prod") else x
    if not include_self:
        neutral = {"sum": 0, "prod": 1, "amax": _lowest(x.dtype), "amin": _highest(x.dtype)}[reduce]
        wide = scatter(wide, dim, index, neutral)
    return _scatter(wide, dim, index, source, _REDUCE_METHODS[reduce]).astype(x.dtype)


def _lowest(dtype: jnp.dtype) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


def _highest(dtype: jnp.dtype) -> Any:
    return jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).max


def _is_mask(index: Array | None) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def _subscript(indices: Sequence[Array | None]) -> tuple[Array | slice, ...]:
    """The indices as a subscript of `jnp`, which places the result's dimensions by the same rule as PyTorch."""
    given = [index for index in indices if index is not None]
    shape = jnp.broadcast_shapes(*(index.shape for index in given))
    return tuple(slice(None) if index is None else jnp.broadcast_to(index, shape) for index in indices)


def index(x: Array, indices: Sequence[Array | None]) -> Array:
    if any(_is_mask(i) for i in indices):
        raise ValueError(
            "aten::index.Tensor with a boolean mask: the result's shape would depend on values; allowed are integer "
            "indices; use torch.where to keep the shape"
        )
    return x.at[_subscript(indices)].get(mode="promise_in_bounds")


def index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    if any(_is_mask(i) for i in indices):
        return _mask_put(x, indices, values, accumulate)
    if accumulate:
        target = widen(x).at[_subscript(indices)]
        return target.add(values.astype(compute_dtype(x.dtype)), mode="promise_in_bounds").astype(x.dtype)
    return x.at[_subscript(indices)].set(values.astype(x.dtype), mode="promise_in_bounds")


def _mask_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool) -> Array:
    """`x[mask] = values` where each masked place gets the same values: a select."""
    mask = next(i for i in indices if i is not None)
    before = next(position for position, i in enumerate(indices) if i is not None)
    after = x.ndim - before - mask.ndim
    alone = sum(i is not None for i in indices) == 1
    if not alone or (values.size != 1 and values.ndim > after):
        raise ValueError(
            "aten::index_put with a boolean mask and values per masked element: their number would depend on the "
            "mask; allowed is one mask with values that broadcast over it; use torch.where"
        )
    mask = mask.astype(jnp.bool_).reshape((1,) * before + mask.shape + (1,) * after)
    values = (values.reshape(()) if values.size == 1 else values).astype(x.dtype)
    return jnp.where(mask, x + values if accumulate else values, x)


def index_select(x: Array, dim: int, index: Array) -> Array:
    if x.ndim == 0:
        return x
    dim = one_dim(dim, x.ndim)
    return x.at[(slice(None),) * dim + (index.reshape(-1),)].get(**_IN_BOUNDS)


def index_add(x: Array, dim: int, index: Array, source: Array, *, alpha: float = 1) -> Array:
    wide = widen(x)
    source = source.astype(wide.dtype)
    source = source if alpha == 1 else (source * alpha).astype(wide.dtype)
    if x.ndim == 0:
        return wide.at[()].add(jnp.sum(source)).astype(x.dtype)
    place = (slice(None),) * one_dim(dim, x.ndim) + (index.reshape(-1),)
    source = jnp.expand_dims(source, one_dim(dim, x.ndim)) if source.ndim < x.ndim else source
    return wide.at[place].add(source, **_IN_BOUNDS).astype(x.dtype)


def masked_scatter(x: Array, mask: Array, source: Array) -> Array:
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    x, mask = jnp.broadcast_to(x, shape), jnp.broadcast_to(mask, shape)
    if source.size == 0:
        return x
    # The n-th true place takes the n-th element of the source.
    order = jnp.cumsum(mask.reshape(-1), dtype=jnp.int32) - 1
    taken = source.reshape(-1).at[jnp.clip(order, 0, source.size - 1)].get(**_IN_BOUNDS)
    return jnp.where(mask, taken.reshape(shape).astype(x.dtype), x)


def masked_scatter_backward(grad: Array, mask: Array, sizes: Sequence[int]) -> Array:
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    size = math.prod(sizes)
    # The places that the mask left alone go out of bounds, where they are dropped.
    order = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, size)
    return jnp.zeros((size,), grad.dtype).at[order].set(grad.reshape(-1), mode="drop").reshape(tuple(sizes))


def searchsorted(
    sorted_sequence: Array,
    x: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    if sorter is not None:
        sorted_sequence = jnp.take_along_axis(sorted_sequence, sorter, -1, mode="promise_in_bounds")
    side = side or ("right" if right else "left")
    dtype = jnp.int32 if out_int32 else jax_dtype(torch.int64)
    common = result_dtype(sorted_sequence, x)
    sequence, values = sorted_sequence.astype(common), jnp.asarray(x, common)
    if sequence.size == 0 or values.size == 0:
        return jnp.zeros(values.shape, dtype)
    if sequence.ndim <= 1:
        return jnp.searchsorted(sequence, values, side=side).astype(dtype)
    rows, queries = sequence.reshape(-1, sequence.shape[-1]), values.reshape(-1, values.shape[-1])
    found = jax.vmap(lambda row, query: jnp.searchsorted(row, query, side=side))(rows, queries)
    return found.reshape(values.shape).astype(dtype)


def bucketize(x: Operand, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return searchsorted(boundaries, x, out_int32=out_int32, right=right)


OPS: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_dense_backward,
    aten.gather.default: gather,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter_add,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index.Tensor: index,
    aten._unsafe_index.Tensor: index,
    aten.index_put.default: index_put,
    aten._unsafe_index_put.default: index_put,
    aten.index_select.default: index_select,
    aten.index_add.default: index_add,
    aten.masked_scatter.default: masked_scatter,
    aten.masked_scatter_backward.default: masked_scatter_backward,
    aten.searchsorted.Scalar: searchsorted,
    aten.searchsorted.Tensor: searchsorted,
    aten.bucketize.Tensor: bucketize,
}
