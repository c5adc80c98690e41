"""The grouped matmul as a loop over blocks of rows, in plain JAX: the CPU's implementation.

Key idea: a block starts where its group does, so that it has one group's weight, and may run over into the next group's
rows, whose own block comes later and overwrites what it wrote. The loop's length is the number of blocks there are, a
value on the device.

Measured on two cores, forward and backward: `jax.lax.ragged_dot`, which multiplies every row by every group, takes 7 to
10 times the loop's time with 8 groups and 40 to 90 times with 64. A forward by one batched matmul over gathered weights
takes 2 to 4 times its time. With a hundred rows a group it takes 1 to 3 times that of one dense matmul of all rows.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class _Blocks(NamedTuple):
    """Group and first row of each block (those beyond `num_blocks` are none), and where groups end."""

    groups: Array
    starts: Array
    ends: Array
    num_blocks: Array


def grouped_matmul(x: Array, weight: Array, group_sizes: Array, *, block_rows: int | None = None) -> Array:
    """Rows of `x`, sorted by group, times the transpose of their group's weight; see `reference.grouped_matmul`.

    Args:
        x: [T, in].
        weight: [E, out, in].
        group_sizes: int32 [E].
        block_rows: rows that are multiplied at once; None is about a group's, within 16 and 128.

    Raises:
        ValueError: block_rows is not positive.
    """
    if block_rows is None:
        mean = -(-x.shape[0] // weight.shape[0])
        block_rows = min(max(1 << (mean - 1).bit_length(), 16), 128)
    if block_rows < 1:
        raise ValueError(f"grouped_matmul: block_rows={block_rows} is not positive; use at least 1")
    return _grouped_matmul(block_rows, x, weight, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(size: int, x: Array, weight: Array, group_sizes: Array) -> Array:
    return _rows(size, x, weight, group_sizes, contracted=1)


def _forward(size: int, x: Array, weight: Array, group_sizes: Array) -> tuple[Array, Any]:
    return _grouped_matmul(size, x, weight, group_sizes), (x, weight, group_sizes)


def _backward(size: int, residuals: Any, grad: Array) -> tuple[Array, Array, None]:
    x, weight, group_sizes = residuals
    blocks = _blocks(size, x.shape[0], group_sizes)
    x_rows, grad_rows = _overhanging(x, size), _overhanging(grad, size)

    def add(i: Any, total: Array) -> Array:
        group, start = blocks.groups[i], blocks.starts[i]
        own = start + jnp.arange(size, dtype=jnp.int32) < blocks.ends[group]
        # Both: rows of no group may hold anything, NaN too.
        rows, part = (jnp.where(own[:, None], lax.dynamic_slice_in_dim(a, start, size), 0) for a in (x_rows, grad_rows))
        product = lax.dot_general(part, rows, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        before = lax.dynamic_index_in_dim(total, group)
        return lax.dynamic_update_slice_in_dim(total, before + product[None], group, axis=0)

    grad_weight = lax.fori_loop(0, blocks.num_blocks, add, jnp.zeros(weight.shape, jnp.float32))
    return _rows(size, grad, weight, group_sizes, contracted=0), grad_weight.astype(weight.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _rows(size: int, x: Array, weight: Array, group_sizes: Array, contracted: int) -> Array:
    """Products of rows with their group's weight over that dimension of it, zero in rows of no group."""
    num_rows, width = x.shape[0], weight.shape[2 - contracted]
    blocks = _blocks(size, num_rows, group_sizes)
    padded = _overhanging(x, size)

    def write(i: Any, out: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(padded, blocks.starts[i], size)
        own = lax.dynamic_index_in_dim(weight, blocks.groups[i], keepdims=False)
        product = lax.dot_general(rows, own, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.float32)
        return lax.dynamic_update_slice_in_dim(out, product.astype(out.dtype), blocks.starts[i], axis=0)

    out = lax.fori_loop(0, blocks.num_blocks, write, lax.empty((num_rows + size, width), x.dtype))[:num_rows]
    in_a_group = jnp.arange(num_rows, dtype=jnp.int32) < blocks.ends[-1]
    return jnp.where(in_a_group[:, None], out, 0)


def _blocks(size: int, num_rows: int, group_sizes: Array) -> _Blocks:
    num_groups = group_sizes.shape[0]
    most = num_rows // size + num_groups  # each group has at most one block that is not full
    ends = jnp.cumsum(group_sizes)
    counts = -(-group_sizes // size)
    groups = jnp.repeat(jnp.arange(num_groups, dtype=jnp.int32), counts, total_repeat_length=most)
    first = (jnp.cumsum(counts) - counts)[groups]
    starts = (ends - group_sizes)[groups] + (jnp.arange(most, dtype=jnp.int32) - first) * size
    return _Blocks(groups, starts, ends, counts.sum())


def _overhanging(x: Array, size: int) -> Array:
    """With rows for the last block to run over into, where slicing would move it otherwise."""
    return jnp.pad(x, ((0, size), (0, 0)))
