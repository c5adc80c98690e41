"""Collectives and the device's own position as ops of a captured graph.

Key idea: each is one node that says over which axes of the mesh it goes, along which dimension, and whose it is
(`label`: a parameter or a module), and lowers to one of JAX's under `shard_map`. They have shapes and no plain PyTorch
meaning: one process is no mesh. What depends on a device's position comes from `axis_index` and from nothing else.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_library = torch.library.Library("tpu_train_mesh", "DEF")
_library.define("all_gather(Tensor x, str[] axes, int size, int dim, str label) -> Tensor")
_library.define("reduce_scatter(Tensor x, str[] axes, int size, int dim, str label) -> Tensor")
_library.define("all_reduce(Tensor x, str[] axes, int size, str op, str label) -> Tensor")
_library.define(
    "exchange(Tensor x, Tensor sizes, Tensor starts, Tensor places, int rows, str axis, int size, str label) -> Tensor"
)
_library.define("axis_index(str axis) -> Tensor")
_library.define("after(Tensor x, Tensor other) -> Tensor")


@torch.library.register_fake("tpu_train_mesh::all_gather", lib=_library)
def _all_gather_shape(x: Tensor, axes: list[str], size: int, dim: int, label: str) -> Tensor:
    del axes, label
    shape = list(x.shape)
    shape[dim] *= size
    return x.new_empty(shape)


@torch.library.register_fake("tpu_train_mesh::reduce_scatter", lib=_library)
def _reduce_scatter_shape(x: Tensor, axes: list[str], size: int, dim: int, label: str) -> Tensor:
    shape = list(x.shape)
    assert shape[dim] % size == 0, f"{label}: dimension {dim} of {shape} over {size} devices ({', '.join(axes)})"
    shape[dim] //= size
    return x.new_empty(shape)


@torch.library.register_fake("tpu_train_mesh::all_reduce", lib=_library)
def _all_reduce_shape(x: Tensor, axes: list[str], size: int, op: str, label: str) -> Tensor:
    del axes, size, op, label
    return x.new_empty(x.shape)


@torch.library.register_fake("tpu_train_mesh::exchange", lib=_library)
def _exchange_shape(
    x: Tensor, sizes: Tensor, starts: Tensor, places: Tensor, rows: int, axis: str, size: int, label: str
) -> Tensor:
    del sizes, starts, places, axis, size, label
    return x.new_empty((rows, *x.shape[1:]))


@torch.library.register_fake("tpu_train_mesh::axis_index", lib=_library)
def _axis_index_shape(axis: str) -> Tensor:
    del axis
    return torch.empty((), dtype=torch.int32)


@torch.library.register_fake("tpu_train_mesh::after", lib=_library)
def _after_shape(x: Tensor, other: Tensor) -> Tensor:
    del other
    return x.new_empty(x.shape)


ops = torch.ops.tpu_train_mesh
ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = ops.all_gather.default, ops.reduce_scatter.default, ops.all_reduce.default
EXCHANGE = ops.exchange.default
COLLECTIVES = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, EXCHANGE)
AXIS_INDEX = ops.axis_index.default
# `after(x, other)` is x, computed when `other` is there: it keeps a recomputation from being merged with its first run.
AFTER = ops.after.default


def axis_index(axis: str) -> Tensor:
    """The device's position along an axis, 0-d int32."""
    return AXIS_INDEX(axis)


def all_reduce(x: Tensor, axes: Sequence[str], size: int, label: str, op: str = "sum") -> Tensor:
    """The sum (or "max") over the devices along the axes; without derivative."""
    return ALL_REDUCE(x, list(axes), size, op, label) if size > 1 else x


def gather_whole(x: Tensor, axis: str, size: int, label: str) -> Tensor:
    """The parts of all devices along an axis, joined in the first dimension; without derivative."""
    return ALL_GATHER(x, [axis], size, 0, label)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, size: int, dim: int, label: str) -> Tensor:
        ctx.arguments = (axis, size, dim, label)
        return ALL_GATHER(x, [axis], size, dim, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        axis, size, dim, label = ctx.arguments
        return REDUCE_SCATTER(grad.contiguous(), [axis], size, dim, label), None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: str, size: int, dim: int, label: str) -> Tensor:
        ctx.arguments = (axis, size, dim, label)
        return REDUCE_SCATTER(x, [axis], size, dim, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        axis, size, dim, label = ctx.arguments
        return ALL_GATHER(grad.contiguous(), [axis], size, dim, label), None, None, None, None


def gather(x: Tensor, axis: str, size: int, dim: int, label: str) -> Tensor:
    """The parts of all devices along an axis, joined; the gradient of each part is the sum of all devices' for it."""
    return _AllGather.apply(x, axis, size, dim, label) if size > 1 else x  # type: ignore[return-value]


def scatter_sum(x: Tensor, axis: str, size: int, dim: int, label: str) -> Tensor:
    """The device's part of the sum over an axis; the gradient of each summand is the parts' gradients joined."""
    return _ReduceScatter.apply(x, axis, size, dim, label) if size > 1 else x  # type: ignore[return-value]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: "Moves", rows: int, axis: str, size: int, label: str) -> Tensor:
        ctx.save_for_backward(*moves)
        ctx.arguments = (x.shape[0], axis, size, label)
        return EXCHANGE(x, *moves, rows, axis, size, label)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        rows, axis, size, label = ctx.arguments
        return EXCHANGE(grad, *Moves(*ctx.saved_tensors).back(), rows, axis, size, label), *[None] * 5


class Moves(NamedTuple):
    """Which rows go where along an axis of n devices, each int32 [n, n] indexed by source and destination.

    Attributes:
        sizes: how many rows.
        starts: the first of them in the source.
        places: where they begin in the destination; no two overlap.
    """

    sizes: Tensor
    starts: Tensor
    places: Tensor

    def back(self) -> "Moves":
        """The same rows in the other direction."""
        return Moves(self.sizes.T, self.places.T, self.starts.T)


def exchange(x: Tensor, moves: Moves, rows: int, axis: str, size: int, label: str) -> Tensor:
    """Rows of [A, ...] to the devices along an axis; what comes from them, [rows, ...], else zeros."""
    return _Exchange.apply(x, moves, rows, axis, size, label)  # type: ignore[return-value]


# Where random draws happen: the axes over which each leading dimension of a drawn tensor is split.
_DRAWS: contextvars.ContextVar[tuple[tuple[str, ...], ...]] = contextvars.ContextVar("draws", default=())


class DrawsNotAllowed(ValueError):
    """A random draw inside a region whose activations are split along other dimensions than batch and sequence."""


_FORBIDDEN = ("forbidden",)


@contextlib.contextmanager
def draws_split(*dims: tuple[str, ...]) -> Iterator[None]:
    """Inside, the leading dimensions of what is drawn are parts of a whole that is split over these axes."""
    token = _DRAWS.set(dims)
    try:
        yield
    finally:
        _DRAWS.reset(token)


@contextlib.contextmanager
def draws_forbidden(where: str) -> Iterator[None]:
    """Inside, a draw is refused: the layout of what is drawn is not known."""
    token = _DRAWS.set((_FORBIDDEN, (where,)))
    try:
        yield
    finally:
        _DRAWS.reset(token)


def draw_axes(ndim: int) -> list[str] | None:
    """For each dimension of a draw the axes it is split over, joined by commas; None where none is split.

    Raises:
        DrawsNotAllowed: inside `draws_forbidden`.
    """
    dims = _DRAWS.get()
    if dims[:1] == (_FORBIDDEN,):
        raise DrawsNotAllowed(
            f"{dims[1][0]} draws random numbers inside a tensor-parallel region; set its dropout to 0 or tensor=1"
        )
    padded = [*dims, *((),) * ndim][:ndim]
    return [",".join(axes) for axes in padded] if any(padded) else None
