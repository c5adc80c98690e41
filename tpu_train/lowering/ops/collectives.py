"""Collectives over named axes, and the device's position along one: JAX's own, under `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from tpu_train.sharding.collectives import AFTER, ALL_GATHER, ALL_REDUCE, AXIS_INDEX, REDUCE_SCATTER


def all_gather(x: Array, axes: Sequence[str], size: int, dim: int, label: str) -> Array:
    return lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


def reduce_scatter(x: Array, axes: Sequence[str], size: int, dim: int, label: str) -> Array:
    return lax.psum_scatter(x, tuple(axes), scatter_dimension=dim, tiled=True)


def all_reduce(x: Array, axes: Sequence[str], size: int, op: str, label: str) -> Array:
    return {"sum": lax.psum, "max": lax.pmax}[op](x, tuple(axes))


def axis_index(axis: str) -> Array:
    return lax.axis_index(axis).astype(jnp.int32)


def after(x: Array, other: Array) -> Array:
    return lax.optimization_barrier((x, other))[0]


OPS: dict[Any, Callable[..., Any]] = {
    ALL_GATHER: all_gather,
    REDUCE_SCATTER: reduce_scatter,
    ALL_REDUCE: all_reduce,
    AXIS_INDEX: axis_index,
    AFTER: after,
}
