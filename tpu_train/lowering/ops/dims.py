"""Dimension arguments of ATen ops: negative numbers, 0-d tensors, and lists where nothing means all."""

from collections.abc import Sequence


def one_dim(dim: int, ndim: int) -> int:
    """`dim` as a non-negative number. A 0-d tensor counts as having one dimension, as in PyTorch."""
    return dim % max(ndim, 1)


def many_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dimensions a reduction runs over; None and the empty list mean all of them."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return tuple(range(ndim))
    return tuple(one_dim(dim, ndim) for dim in dims) if ndim else ()
