"""Views and shapes: reshaping, slicing, joining, and the derivatives of slicing.

Key idea: nothing is strided here. Slices are static (`lax.slice`) and their derivatives are `lax.pad`, which XLA fuses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import promote
from tpu_train.lowering.ops.dims import one_dim

aten = torch.ops.aten


def view(x: Array, size: Sequence[int]) -> Array:
    return x.reshape(tuple(size))


def permute(x: Array, dims: Sequence[int]) -> Array:
    return lax.transpose(x, [one_dim(dim, x.ndim) for dim in dims])


def transpose(x: Array, dim0: int, dim1: int) -> Array:
    return jnp.swapaxes(x, one_dim(dim0, x.ndim), one_dim(dim1, x.ndim)) if x.ndim else x


def t(x: Array) -> Array:
    return x.T


def expand(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    leading = len(size) - x.ndim
    shape = [x.shape[i - leading] if length == -1 else length for i, length in enumerate(size)]
    return jnp.broadcast_to(x, shape)


def unsqueeze(x: Array, dim: int) -> Array:
    return jnp.expand_dims(x, dim)


def squeeze(x: Array) -> Array:
    return jnp.squeeze(x)


def squeeze_dims(x: Array, dims: int | Sequence[int]) -> Array:
    dims = [dims] if isinstance(dims, int) else dims
    wanted = {one_dim(dim, x.ndim) for dim in dims}
    return x.reshape([length for dim, length in enumerate(x.shape) if dim not in wanted or length != 1])


def _bounds(length: int, start: int | None, end: int | None, step: int) -> tuple[int, int]:
    """Non-negative start and end of a slice, clipped to the dimension as PyTorch does."""
    first, last, _ = slice(start, end, step).indices(length)
    return first, max(first, last)


def slice_(x: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Array:
    dim = one_dim(dim, x.ndim)
    first, last = _bounds(x.shape[dim], start, end, step)
    return lax.slice_in_dim(x, first, last, step, dim)


def slice_backward(grad: Array, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Array:
    dim = one_dim(dim, len(sizes))
    first, _ = _bounds(sizes[dim], start, end, step)
    return _pad_dim(grad, dim, first, sizes[dim], step)


def select(x: Array, dim: int, index: int) -> Array:
    return lax.index_in_dim(x, index, one_dim(dim, x.ndim), keepdims=False)


def select_backward(grad: Array, sizes: Sequence[int], dim: int, index: int) -> Array:
    dim = one_dim(dim, len(sizes))
    return _pad_dim(jnp.expand_dims(grad, dim), dim, index % sizes[dim], sizes[dim], 1)


def _pad_dim(x: Array, dim: int, before: int, length: int, step: int) -> Array:
    """`x` with zeros around and between its slices so that `dim` has `length`."""
    count = x.shape[dim]
    used = (count - 1) * step + 1 if count else 0
    padding = [(0, 0, 0)] * x.ndim
    padding[dim] = (before, length - before - used, step - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), padding)


def slice_scatter(
    x: Array, source: Array, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Array:
    dim = one_dim(dim, x.ndim)
    first, last = _bounds(x.shape[dim], start, end, step)
    source = source.astype(x.dtype)
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, source, first, dim)
    return x.at[(slice(None),) * dim + (slice(first, last, step),)].set(source)


def select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    dim = one_dim(dim, x.ndim)
    source = jnp.expand_dims(source.astype(x.dtype), dim)
    return lax.dynamic_update_slice_in_dim(x, source, index % x.shape[dim], dim)


def split(x: Array, split_size: int, dim: int = 0) -> list[Array]:
    length = x.shape[one_dim(dim, x.ndim)]
    if split_size == 0:  # allowed for an empty dimension only: one empty part
        return [x]
    sizes = [min(split_size, length - start) for start in range(0, length, split_size)]
    return split_with_sizes(x, sizes or [0], dim)


def split_with_sizes(x: Array, split_sizes: Sequence[int], dim: int = 0) -> list[Array]:
    return list(lax.split(x, split_sizes, one_dim(dim, x.ndim)))


def unbind(x: Array, dim: int = 0) -> list[Array]:
    dim = one_dim(dim, x.ndim)
    return [lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])]


def cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    # PyTorch still skips tensors of shape (0,), whatever the shapes of the others, but they count for the dtype.
    promoted = promote(*tensors)
    parts = [x for x in promoted if x.shape != (0,)] or promoted[:1]
    return jnp.concatenate(parts, one_dim(dim, parts[0].ndim))


def stack(tensors: Sequence[Array], dim: int = 0) -> Array:
    parts = promote(*tensors)
    return jnp.stack(parts, one_dim(dim, parts[0].ndim + 1))


def flip(x: Array, dims: Sequence[int]) -> Array:
    return lax.rev(x, [one_dim(dim, x.ndim) for dim in dims]) if x.ndim else x


def roll(x: Array, shifts: Sequence[int], dims: Sequence[int] = ()) -> Array:
    if not dims or x.size == 0:
        return jnp.roll(x, shifts[0])
    return jnp.roll(x, tuple(shifts), tuple(dims))


def repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


def diagonal(x: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    return jnp.diagonal(x, offset, dim1, dim2)


def diagonal_scatter(x: Array, source: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Array:
    dim1, dim2 = one_dim(dim1, x.ndim), one_dim(dim2, x.ndim)
    position = jnp.arange(source.shape[-1])
    last = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    last = last.at[..., position + max(0, -offset), position + max(0, offset)].set(source.astype(x.dtype))
    return jnp.moveaxis(last, (-2, -1), (dim1, dim2))


def constant_pad_nd(x: Array, pad: Sequence[int], value: float = 0) -> Array:
    padding = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):  # pairs start at the last dimension; negative numbers cut
        padding[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, jnp.asarray(value).astype(x.dtype), padding)


def tril(x: Array, diagonal: int = 0) -> Array:
    return jnp.tril(x, diagonal)


def triu(x: Array, diagonal: int = 0) -> Array:
    return jnp.triu(x, diagonal)


def unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    if x.ndim == 0:
        return x.reshape(1)[:size]
    dim = one_dim(dimension, x.ndim)
    starts = jnp.arange(0, x.shape[dim] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dim, mode="clip")
    return jnp.moveaxis(windows, dim + 1, -1)


OPS: dict[Any, Callable[..., Any]] = {
    aten.view.default: view,
    aten._unsafe_view.default: view,
    aten.permute.default: permute,
    aten.transpose.int: transpose,
    aten.t.default: t,
    aten.expand.default: expand,
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.default: squeeze,
    aten.squeeze.dim: squeeze_dims,
    aten.squeeze.dims: squeeze_dims,
    aten.slice.Tensor: slice_,
    aten.slice_backward.default: slice_backward,
    aten.slice_scatter.default: slice_scatter,
    aten.select.int: select,
    aten.select_backward.default: select_backward,
    aten.select_scatter.default: select_scatter,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split_with_sizes,
    aten.unbind.int: unbind,
    aten.cat.default: cat,
    aten.stack.default: stack,
    aten.flip.default: flip,
    aten.roll.default: roll,
    aten.repeat.default: repeat,
    aten.diagonal.default: diagonal,
    aten.diagonal_scatter.default: diagonal_scatter,
    aten.constant_pad_nd.default: constant_pad_nd,
    aten.tril.default: tril,
    aten.triu.default: triu,
    aten.unfold.default: unfold,
}
