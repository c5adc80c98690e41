"""The projection and loss over blocks of the vocabulary, as plain JAX: the CPU's implementation.

Key idea: a block's logits are made, used and forgotten, in the forward (a running maximum and sum) and again in the
backward, where a block's `dlogits` give its rows of the weight's gradient and one more term of the gradient of `x`.
The backward over blocks is also the TPU's; there a Pallas kernel makes the `dlogits`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

# Elements of one block's fp32 logits: 16 MiB. For 2048 x 512 x 32,000 on two cores, blocks of 1024 to 8192 columns take
# within 10 % of each other's time, and all logits at once 0.9 (fp32) to 1.2 (bf16) times it.
_BLOCK_ELEMENTS = 2**22
_MIN_COLUMNS = 256


def linear_logsumexp(
    x: Array,
    weight: Array,
    labels: Array,
    num_columns: Array | None = None,
    *,
    soft_cap: float | None = None,
    block_columns: int | None = None,
) -> tuple[Array, Array]:
    """Log-sum-exp of each row's logits, and the logit of its label; see `reference.linear_logsumexp`.

    Args:
        x: [R, D].
        weight: [V, D]; rows that do not exist hold finite numbers.
        labels: int32 [R].
        num_columns: int32 scalar.
        soft_cap: of the logits.
        block_columns: columns of the logits that are in memory at a time; None is about 16 MiB of them.
    """
    num_rows, vocabulary = x.shape[0], weight.shape[0]
    fitting = max(_BLOCK_ELEMENTS // max(num_rows, 1), _MIN_COLUMNS)
    columns = min(block_columns or fitting, vocabulary)
    return _linear_logsumexp((soft_cap, columns), x, weight, labels, num_columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _linear_logsumexp(options: Any, x: Array, weight: Array, labels: Array, num_columns: Any) -> tuple[Array, Array]:
    soft_cap, columns = options
    shape = (x.shape[0],)

    def step(start: Any, size: int, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, picked = carry
        logits, exists, is_label = _block(x, weight, labels, num_columns, soft_cap, start, size)
        logits = jnp.where(exists, logits, -jnp.inf)
        new = jnp.maximum(maximum, logits.max(axis=1))
        finite = jnp.where(jnp.isneginf(new), 0, new)  # a block, or all so far, may have no column that exists
        total = total * jnp.exp(maximum - finite) + jnp.exp(logits - finite[:, None]).sum(axis=1)
        return new, total, picked + jnp.where(is_label, logits, 0).sum(axis=1)

    start = (jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(shape))
    maximum, total, picked = over_chunks(step, weight.shape[0], columns, start)
    return maximum + jnp.log(total), picked


def _forward(options: Any, x: Array, weight: Array, labels: Array, num_columns: Any) -> tuple[Any, Any]:
    vectors: Any = _linear_logsumexp(options, x, weight, labels, num_columns)
    return vectors, (x, weight, labels, num_columns, vectors[0])


def _backward(options: Any, residuals: Any, grads: tuple[Array, Array]) -> tuple[Any, ...]:
    soft_cap, columns = options
    x, weight, labels, num_columns, logsumexp = residuals
    grad_logsumexp, grad_picked = grads

    def dlogits(start: Any, size: int) -> Array:
        logits, exists, is_label = _block(x, weight, labels, num_columns, soft_cap, start, size)
        softmax = jnp.exp(jnp.where(exists, logits - logsumexp[:, None], -jnp.inf))
        grad = softmax * grad_logsumexp[:, None] + jnp.where(is_label, grad_picked[:, None], 0)
        return grad if soft_cap is None else grad * (1 - (logits / soft_cap) ** 2)

    return *grads_of_operands(dlogits, x, weight, columns), None, None


_linear_logsumexp.defvjp(_forward, _backward)


def grads_of_operands(
    dlogits: Callable[[Any, int], Array], x: Array, weight: Array, columns: int
) -> tuple[Array, Array]:
    """Gradients of `x` and `weight` from those of the logits, `columns` of them at a time.

    Args:
        dlogits: makes [R, size] of them from the first column, a traced multiple of `columns`, and the static size.
        x: [R, D].
        weight: [V, D].
        columns: of a chunk; the last one has the rest.
    """

    def step(start: Any, size: int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        grad_x, grad_weight = carry
        grad = dlogits(start, size).astype(x.dtype)
        part = lax.dynamic_slice_in_dim(weight, start, size)
        grad_x += lax.dot(grad, part, preferred_element_type=jnp.float32)
        rows = lax.dot_general(grad, x, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return grad_x, lax.dynamic_update_slice_in_dim(grad_weight, rows.astype(weight.dtype), start, axis=0)

    # Every element of the weight's gradient is written once, so that nothing need be there before.
    start = (jnp.zeros(x.shape, jnp.float32), lax.empty(weight.shape, weight.dtype))
    grad_x, grad_weight = over_chunks(step, weight.shape[0], columns, start)
    return grad_x.astype(x.dtype), grad_weight


def over_chunks(step: Callable[[Any, int, Any], Any], size: int, chunk: int, carry: Any) -> Any:
    """Carries through `step(start, size, carry)` over chunks of equal size, then over the rest."""
    whole = size // chunk
    if whole == 1:
        carry = step(0, chunk, carry)
    elif whole:
        carry = lax.fori_loop(0, whole, lambda i, c: step(i * chunk, chunk, c), carry)
    rest = size - whole * chunk
    return step(whole * chunk, rest, carry) if rest else carry


def _block(
    x: Array, weight: Array, labels: Array, num_columns: Any, soft_cap: float | None, start: Any, size: int
) -> tuple[Array, Array, Array]:
    """A block's logits (fp32, soft-capped), which of its columns exist, and where the labels are."""
    part = lax.dynamic_slice_in_dim(weight, start, size)
    logits = lax.dot_general(x, part, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    columns = start + jnp.arange(size, dtype=jnp.int32)
    exists = columns < (weight.shape[0] if num_columns is None else num_columns)
    return logits, exists[None, :], (labels[:, None] == columns) & exists
