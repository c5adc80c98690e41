"""Collectives over named axes, and the device's position along one: JAX's own, under `shard_map`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tpu_train.sharding.collectives import AFTER, ALL_GATHER, ALL_REDUCE, AXIS_INDEX, EXCHANGE, REDUCE_SCATTER


def all_gather(x: Array, axes: Sequence[str], size: int, dim: int, label: str) -> Array:
    return lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


def reduce_scatter(x: Array, axes: Sequence[str], size: int, dim: int, label: str) -> Array:
    return lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)


def all_reduce(x: Array, axes: Sequence[str], size: int, op: str, label: str) -> Array:
    return {"sum": lax.psum, "max": lax.pmax}[op](x, tuple(axes))


def exchange(
    x: Array, sizes: Array, starts: Array, places: Array, rows: int, axis: str, size: int, label: str
) -> Array:
    """On TPU the rows that move; elsewhere, where XLA has no ragged exchange, all rows and a choice of them."""
    return lax.platform_dependent(
        x, sizes, starts, places,
        tpu=functools.partial(_exchange_ragged, rows=rows, axis=axis),
        default=functools.partial(_exchange_gathered, rows=rows, axis=axis),
    )  # fmt: skip


def _exchange_ragged(x: Array, sizes: Array, starts: Array, places: Array, *, rows: int, axis: str) -> Array:
    me = lax.axis_index(axis)
    out = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return lax.ragged_all_to_all(x, out, starts[me], sizes[me], places[me], sizes[:, me], axis_name=axis)


def _exchange_gathered(x: Array, sizes: Array, starts: Array, places: Array, *, rows: int, axis: str) -> Array:
    me = lax.axis_index(axis)
    everything = lax.all_gather(x, axis, axis=0, tiled=True)
    slot = jnp.arange(rows, dtype=jnp.int32)[:, None]
    offset = slot - places[:, me]  # [rows, sources]
    here = (offset >= 0) & (offset < sizes[:, me])
    source = jnp.argmax(here, axis=1)
    row = source * x.shape[0] + starts[source, me] + jnp.take_along_axis(offset, source[:, None], 1)[:, 0]
    found = here.any(1)
    picked = everything[jnp.where(found, row, 0)]
    return jnp.where(found.reshape(-1, *[1] * (x.ndim - 1)), picked, 0)


def axis_index(axis: str) -> Array:
    return lax.axis_index(axis).astype(jnp.int32)


def after(x: Array, other: Array) -> Array:
    return lax.optimization_barrier((x, other))[0]


OPS: dict[Any, Callable[..., Any]] = {
    ALL_GATHER: all_gather,
    REDUCE_SCATTER: reduce_scatter,
    ALL_REDUCE: all_reduce,
    EXCHANGE: exchange,
    AXIS_INDEX: axis_index,
    AFTER: after,
}
