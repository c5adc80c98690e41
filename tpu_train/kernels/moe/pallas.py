"""The grouped matmul by JAX's megablox kernels: blocks of rows, each visited once by every group that has rows in it.

Key idea: with the weight as [E, out, in] none of the three products needs a transposed copy. The forward contracts the
weight's last dimension (`transpose_rhs`), the gradient of `x` its middle one, and the gradient of the weight is
`tgmm` of the gradient with `x`, which comes out as [E, out, in] and writes an empty group's zeros itself.
Megablox leaves rows that belong to no group as they are in memory; a `where`, which XLA fuses into what reads the
result, makes zeros of them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from tpu_train.kernels.moe import limits


class _Options(NamedTuple):
    rows: int
    in_width: int
    out_width: int
    interpret: bool


def grouped_matmul(
    x: Array,
    weight: Array,
    group_sizes: Array,
    *,
    block_rows: int | None = None,
    block_in: int | None = None,
    block_out: int | None = None,
    interpret: bool = False,
) -> Array:
    """Rows of `x`, sorted by group, times the transpose of their group's weight; see `reference.grouped_matmul`.

    Args:
        x: [T, in], bf16 or fp32; a T that is no multiple of `block_rows` costs a padded copy.
        weight: [E, out, in] of the same dtype.
        group_sizes: int32 [E].
        block_rows: a block's part of T; None is the choice of `limits`, likewise the next two.
        block_in: a block's part of `in`.
        block_out: a block's part of `out`.
        interpret: run without a TPU, slowly.

    Raises:
        ValueError: a block size that `limits.check_grouped_matmul` refuses, or dtypes that differ.
    """
    num_rows, (_, out_width, in_width) = x.shape[0], weight.shape
    if x.dtype != weight.dtype:
        raise ValueError(f"grouped_matmul: x is {x.dtype} and weight {weight.dtype}; cast one of them")
    itemsize = x.dtype.itemsize
    found = limits.check_grouped_matmul(
        in_width=in_width, out_width=out_width, num_rows=num_rows, itemsize=itemsize,
        block_rows=block_rows, block_in=block_in, block_out=block_out,
    )  # fmt: skip
    if found:
        raise ValueError("grouped_matmul: " + "; ".join(found))
    options = _Options(
        block_rows or limits.row_block(num_rows),
        block_in or limits.width_block(in_width, itemsize),
        block_out or limits.width_block(out_width, itemsize),
        interpret,
    )
    return _grouped_matmul(options, x, weight, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(options: _Options, x: Array, weight: Array, group_sizes: Array) -> Array:
    return _rows(options, x, weight, group_sizes, transpose=True)


def _forward(options: _Options, x: Array, weight: Array, group_sizes: Array) -> tuple[Array, Any]:
    return _grouped_matmul(options, x, weight, group_sizes), (x, weight, group_sizes)


def _backward(options: _Options, residuals: Any, grad: Array) -> tuple[Array, Array, None]:
    x, weight, group_sizes = residuals
    grad_x = _rows(options, grad, weight, group_sizes, transpose=False)
    grad_weight = tgmm(
        _padded(grad, options.rows).swapaxes(0, 1),  # which tgmm undoes
        _padded(x, options.rows),
        group_sizes,
        weight.dtype,
        (options.rows, options.out_width, options.in_width),
        interpret=options.interpret,
    )
    return grad_x, grad_weight, None


_grouped_matmul.defvjp(_forward, _backward)


def _rows(options: _Options, x: Array, weight: Array, group_sizes: Array, transpose: bool) -> Array:
    """The product with the weight or its transpose, zero in rows of no group."""
    num_rows, widths = x.shape[0], (options.in_width, options.out_width)
    contracted, kept = widths if transpose else widths[::-1]
    out = gmm(
        _padded(x, options.rows),
        weight,
        group_sizes,
        x.dtype,
        (options.rows, contracted, kept),
        transpose_rhs=transpose,
        interpret=options.interpret,
    )[:num_rows]
    in_a_group = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes.sum()
    return jnp.where(in_a_group[:, None], out, 0)


def _padded(x: Array, multiple: int) -> Array:
    rest = -x.shape[0] % multiple
    return jnp.pad(x, ((0, rest), (0, 0))) if rest else x
