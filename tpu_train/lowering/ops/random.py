"""Random draws: each from the current key folded with the draw's site (see `graph.random_sites`)."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpu_train.lowering import context
from tpu_train.lowering.intrinsics import random_integers, random_normal, random_uniform


def _key(site: int) -> Array:
    key = context.current().key
    assert key is not None, "a program that draws random numbers was lowered without a key"
    # fold_in takes 32 bits; a site has 62.
    return jax.random.fold_in(jax.random.fold_in(key, site >> 31), site & 0x7FFFFFFF)


def _part_of_whole(draw: Callable[[tuple[int, ...]], Array], size: Sequence[int], axes: Sequence[str] | None) -> Array:
    """The device's part of what one device alone would draw.

    JAX's bits depend on their place in the whole, so the whole is asked for and cut; on TPU the cut is fused into the
    generation. Only that way does a mesh draw what a single device draws.
    """
    names = [tuple(part.split(",")) if part else () for part in axes or ()]
    if not any(names):
        return draw(tuple(size))
    whole = tuple(length * lax.axis_size(over) if over else length for length, over in zip(size, names, strict=True))
    starts = [lax.axis_index(over) * length if over else 0 for length, over in zip(size, names, strict=True)]
    return lax.dynamic_slice(draw(whole), starts, size)


def uniform(size: list[int], site: int, *, dtype: jnp.dtype, axes: Sequence[str] | None = None) -> Array:
    return _part_of_whole(lambda shape: jax.random.uniform(_key(site), shape, dtype), size, axes)


def normal(size: list[int], site: int, *, dtype: jnp.dtype, axes: Sequence[str] | None = None) -> Array:
    return _part_of_whole(lambda shape: jax.random.normal(_key(site), shape, dtype), size, axes)


def integers(
    size: list[int], low: int, high: int, site: int, *, dtype: jnp.dtype, axes: Sequence[str] | None = None
) -> Array:
    return _part_of_whole(lambda shape: jax.random.randint(_key(site), shape, low, high, dtype), size, axes)


OPS: dict[Any, Callable[..., Any]] = {random_uniform: uniform, random_normal: normal, random_integers: integers}
