"""The projection and loss as Pallas TPU kernels: blocks over rows, vocabulary and depth, any sizes.

Key idea: both kernels accumulate a block of logits over the depth in VMEM and then work on it a strip of rows at a
time. The forward keeps each row's running maximum, sum and picked logit. The backward makes the logits again, once, and
writes their gradient, a chunk of the vocabulary at a time, for the two products that XLA's own matmuls do best
(`blockwise.grads_of_operands`): 8 R·V·D FLOPs in all, where separate kernels for `x` and `weight` would need 10.

The blocks that overhang an array read what is there: columns beyond the vocabulary are masked, the depth's rest is
zeroed, rows beyond the last are written nowhere.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_train.kernels.loss import limits
from tpu_train.kernels.loss.blockwise import grads_of_operands

_EMPTY = -1e30  # a maximum that no logit is under; -inf would make NaN of the first difference


class _Options(NamedTuple):
    soft_cap: float | None
    rows: int
    columns: int
    depth: int
    chunk: int
    interpret: bool


def linear_logsumexp(
    x: Array,
    weight: Array,
    labels: Array,
    num_columns: Array | None = None,
    *,
    soft_cap: float | None = None,
    block_rows: int | None = None,
    block_columns: int | None = None,
    block_depth: int | None = None,
    chunk_columns: int | None = None,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Log-sum-exp of each row's logits, and the logit of its label; see `reference.linear_logsumexp`.

    Args:
        x: [R, D], bf16 or fp32.
        weight: [V, D] of the same dtype; rows that do not exist hold finite numbers.
        labels: int32 [R].
        num_columns: int32 scalar.
        soft_cap: of the logits.
        block_rows: a block's part of R; None is `limits.blocks`, likewise the next two.
        block_columns: a block's part of V.
        block_depth: a block's part of D.
        chunk_columns: columns of the logits' gradient that the backward has in HBM at a time, in whole blocks; None is
            about 128 MiB of them.
        interpret: run without a TPU, slowly.

    Raises:
        ValueError: a block size that `limits.check_linear_logsumexp` refuses, or dtypes that differ.
    """
    (num_rows, depth), vocabulary = x.shape, weight.shape[0]
    if x.dtype != weight.dtype:
        raise ValueError(f"linear_logsumexp: x is {x.dtype} and weight {weight.dtype}; cast one of them")
    asked = {"block_rows": block_rows, "block_columns": block_columns, "block_depth": block_depth}
    found = limits.check_linear_logsumexp(
        depth=depth, vocabulary=vocabulary, num_rows=num_rows, itemsize=x.dtype.itemsize, **asked
    )
    rows, columns, deep = limits.blocks(num_rows, depth, vocabulary, x.dtype.itemsize)
    rows, columns, deep = block_rows or rows, block_columns or columns, block_depth or deep
    chunk = chunk_columns or limits.chunk_columns(num_rows, vocabulary, x.dtype.itemsize, columns)
    if chunk < vocabulary and chunk % columns:
        found.append(f"chunk_columns={chunk} is no multiple of the block's {columns} columns; use one")
    if found:
        raise ValueError("linear_logsumexp: " + "; ".join(found))
    options = _Options(soft_cap, rows, columns, deep, chunk, interpret)
    return _linear_logsumexp(options, x, weight, labels, num_columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logsumexp(options: _Options, x: Array, weight: Array, labels: Array, num_columns: Any) -> Any:
    num_rows, vocabulary = x.shape[0], weight.shape[0]
    vector = jax.ShapeDtypeStruct((num_rows, 1), jnp.float32)
    logsumexp, picked = _call(
        functools.partial(_forward_kernel, options, x.shape[1], pl.cdiv(vocabulary, options.columns)),
        options,
        (x, weight, [labels]),
        _scalars(0, weight, num_columns),
        vocabulary,
        (vector, vector),
        [pltpu.VMEM((options.rows, 1), jnp.float32)] * 2,
    )
    return logsumexp[:, 0], picked[:, 0]


def _forward(options: _Options, x: Array, weight: Array, labels: Array, num_columns: Any) -> tuple[Any, Any]:
    vectors: Any = _linear_logsumexp(options, x, weight, labels, num_columns)
    return vectors, (x, weight, labels, num_columns, vectors[0])


def _backward(options: _Options, residuals: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    x, weight, labels, num_columns, logsumexp = residuals

    def dlogits(start: Any, size: int) -> Array:
        return _call(
            functools.partial(_dlogits_kernel, options, x.shape[1]),
            options,
            (x, weight, [labels, logsumexp, *grads]),
            _scalars(start // options.columns, weight, num_columns),
            size,
            jax.ShapeDtypeStruct((x.shape[0], size), x.dtype),
            [],
        )

    return *grads_of_operands(dlogits, x, weight, options.chunk), None, None


_linear_logsumexp.defvjp(_forward, _backward)


def _scalars(block: Any, weight: Array, num_columns: Array | None) -> Array:
    """The weight's first block, and how many of its rows exist."""
    count = weight.shape[0] if num_columns is None else num_columns
    return jnp.stack([jnp.asarray(block, jnp.int32), jnp.asarray(count, jnp.int32)])


def _call(
    kernel: Any, options: _Options, operands: tuple[Array, Array, list[Array]], scalars: Array, size: int,
    result: Any, scratch: list[Any],
) -> Any:  # fmt: skip
    """A kernel over blocks of [R, `size`] logits, from the weight's block `scalars[0]`."""
    x, weight, vectors = operands
    rows, columns, depth = options.rows, options.columns, options.depth
    grid = (pl.cdiv(x.shape[0], rows), pl.cdiv(size, columns), pl.cdiv(x.shape[1], depth))
    vector = pl.BlockSpec((rows, 1), lambda r, _v, _d, _s: (r, 0))
    block = pl.BlockSpec((rows, columns), lambda r, v, _d, _s: (r, v))
    over_columns = "parallel"
    if isinstance(result, tuple):  # carried from one block of the vocabulary to the next
        block, over_columns = (vector,) * len(result), "arbitrary"
    itemsize = x.dtype.itemsize
    read_bytes = (grid[1] * x.size + grid[0] * size * x.shape[1]) * itemsize
    return pl.pallas_call(
        kernel,
        out_shape=result,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[
                *[vector] * len(vectors),
                pl.BlockSpec((rows, depth), lambda r, _v, d, _s: (r, d)),
                pl.BlockSpec((columns, depth), lambda _r, v, d, scalars: (scalars[0] + v, d)),
            ],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32), *scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", over_columns, "arbitrary"),
            vmem_limit_bytes=limits.vmem_bytes(rows, columns, depth, itemsize) + 2**20,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.size * size, bytes_accessed=read_bytes, transcendentals=x.shape[0] * size
        ),
        interpret=options.interpret,
    )(scalars, *[v[:, None] for v in vectors], x, weight)


def _forward_kernel(
    options: _Options, depth: int, num_blocks: int, scalars: Any, labels: Any, x: Any, weight: Any,
    logsumexp: Any, picked: Any, logits: Any, maximum: Any, total: Any,
) -> None:  # fmt: skip
    block = pl.program_id(1)  # the interpreter has it here, not in a branch or a loop

    @pl.when((block == 0) & (pl.program_id(2) == 0))
    def _() -> None:
        maximum[...] = jnp.full_like(maximum, _EMPTY)
        total[...] = jnp.zeros_like(total)
        picked[...] = jnp.zeros_like(picked)

    def strip(rows: Any) -> None:
        values, exists, is_label = _load(options, scalars, block, labels, logits, rows)
        old = maximum[rows, :]
        new = jnp.maximum(old, jnp.max(jnp.where(exists, values, _EMPTY), axis=1, keepdims=True))
        exponentials = jnp.where(exists, jnp.exp(values - new), 0)
        total[rows, :] = total[rows, :] * jnp.exp(old - new) + jnp.sum(exponentials, axis=1, keepdims=True)
        maximum[rows, :] = new
        picked[rows, :] += jnp.sum(jnp.where(is_label, values, 0), axis=1, keepdims=True)

    def finish() -> None:
        _over_strips(options.rows, strip)

        @pl.when(block == num_blocks - 1)
        def _() -> None:
            some = total[...] > 0
            found = maximum[...] + jnp.log(jnp.where(some, total[...], 1))
            logsumexp[...] = jnp.where(some, found, -jnp.inf)

    _accumulate(options, depth, x, weight, logits, finish)


def _dlogits_kernel(
    options: _Options, depth: int, scalars: Any, labels: Any, logsumexp: Any, grad_logsumexp: Any, grad_picked: Any,
    x: Any, weight: Any, grad: Any, logits: Any,
) -> None:  # fmt: skip
    block = pl.program_id(1)

    def strip(rows: Any) -> None:
        values, exists, is_label = _load(options, scalars, block, labels, logits, rows)
        softmax = jnp.where(exists, jnp.exp(values - logsumexp[rows, :]), 0)
        found = softmax * grad_logsumexp[rows, :] + jnp.where(is_label, grad_picked[rows, :], 0)
        if options.soft_cap is not None:
            found *= 1 - (values / options.soft_cap) ** 2
        grad[rows, :] = found.astype(grad.dtype)

    _accumulate(options, depth, x, weight, logits, lambda: _over_strips(options.rows, strip))


def _accumulate(options: _Options, depth: int, x: Any, weight: Any, logits: Any, finish: Any) -> None:
    """Adds this step's product to the block of logits; `finish` once it is whole."""
    step, num_steps = pl.program_id(2), pl.cdiv(depth, options.depth)
    rest = depth % options.depth

    @pl.when(step == 0)
    def _() -> None:
        logits[...] = jnp.zeros_like(logits)

    def add(rest: int) -> None:
        operands = _first_columns(x[...], rest), _first_columns(weight[...], rest)
        logits[...] += lax.dot_general(*operands, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)

    if rest:  # the last step's blocks overhang
        pl.when(step < num_steps - 1)(lambda: add(0))
        pl.when(step == num_steps - 1)(lambda: add(rest))
    else:
        add(0)
    pl.when(step == num_steps - 1)(finish)


def _first_columns(value: Array, count: int) -> Array:
    """Zeros beyond the first `count` columns; 0 is all."""
    if not count:
        return value
    there = lax.broadcasted_iota(jnp.int32, value.shape, 1) < count
    return jnp.where(there, value.astype(jnp.float32), 0).astype(value.dtype)


def _over_strips(num_rows: int, strip: Any) -> None:
    """Calls `strip(rows)` for every strip of a block's rows; rows that are no multiple of a strip are one."""
    size = limits.STRIP
    if num_rows % size:
        strip(pl.ds(0, num_rows))
    else:
        pl.loop(0, num_rows // size)(lambda i: strip(pl.ds(pl.multiple_of(i * size, size), size)))


def _load(
    options: _Options, scalars: Any, block: Any, labels: Any, logits: Any, rows: Any
) -> tuple[Array, Array, Array]:
    """A strip's logits (soft-capped), which of them exist, and where the labels are."""
    values = logits[rows, :]
    if options.soft_cap is not None:
        values = options.soft_cap * jnp.tanh(values / options.soft_cap)
    columns = (scalars[0] + block) * options.columns + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    exists = columns < scalars[1]
    return values, exists, (labels[rows, :] == columns) & exists
