"""Random draws: each from the current key folded with the draw's site (see `graph.random_sites`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpu_train.lowering import context
from tpu_train.lowering.intrinsics import random_integers, random_normal, random_uniform


def _key(site: int) -> Array:
    key = context.current().key
    assert key is not None, "a program that draws random numbers was lowered without a key"
    # fold_in takes 32 bits; a site has 62.
    return jax.random.fold_in(jax.random.fold_in(key, site >> 31), site & 0x7FFFFFFF)


def uniform(size: list[int], site: int, *, dtype: jnp.dtype) -> Array:
    return jax.random.uniform(_key(site), size, dtype)


def normal(size: list[int], site: int, *, dtype: jnp.dtype) -> Array:
    return jax.random.normal(_key(site), size, dtype)


def integers(size: list[int], low: int, high: int, site: int, *, dtype: jnp.dtype) -> Array:
    return jax.random.randint(_key(site), size, low, high, dtype)


OPS: dict[Any, Callable[..., Any]] = {random_uniform: uniform, random_normal: normal, random_integers: integers}
