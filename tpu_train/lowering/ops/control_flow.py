"""Loops over sub-graphs, as `jax.lax.scan`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tpu_train.lowering import context
from tpu_train.lowering.intrinsics import loop


def lower_loop(
    body: Callable[..., list[Array]], carry: list[Array], xs: list[Array], consts: list[Array], reverse: bool = False
) -> tuple[list[Array], list[Array]]:
    """See `intrinsics.Loop`. The iteration's index is folded into the key of what its body draws."""
    trips = xs[0].shape[0]

    def iterate(carried: list[Array], sliced: tuple[Array, list[Array]]) -> tuple[list[Array], list[Array]]:
        index, x_slices = sliced
        with context.use(context.iteration(index)):
            out = body(*carried, *x_slices, *consts)
        return list(out[: len(carried)]), list(out[len(carried) :])

    last, ys = jax.lax.scan(iterate, list(carry), (jnp.arange(trips, dtype=jnp.int32), list(xs)), reverse=reverse)
    return last, ys


OPS: dict[Any, Callable[..., Any]] = {loop: lower_loop}
