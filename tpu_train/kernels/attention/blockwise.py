"""Attention by blocks in plain JAX: what a CPU trains with (Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 2).

Key idea: one key head of one sequence at a time, so that a block of scores stays in a core's cache; blocks that the
causal order or the window hides are never visited, and the backward makes a block's scores again from the log of
the softmax's denominator, which is all that is kept besides the result. Everything within is fp32.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from tpu_train.kernels.attention.limits import check_blockwise, check_shapes

# Below every score and finite: the first block's maximum can be subtracted from it.
_LOWEST = -1e30


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The static options, with a sequence's length.

    Attributes:
        seq_len: S.
        window: see `blockwise_attention`.
        q: queries per block.
        kv: keys per block.
    """

    seq_len: int
    window: int | None
    q: int
    kv: int

    @property
    def num_q(self) -> int:
        return math.ceil(self.seq_len / self.q)

    @property
    def num_kv(self) -> int:
        return math.ceil(self.seq_len / self.kv)

    def key_blocks(self, q_index: Array) -> tuple[Array, Array]:
        """First key block that queries of a block see, and the one after the last."""
        first_token = q_index * self.q
        end = jnp.minimum((first_token + self.q - 1) // self.kv + 1, self.num_kv)
        if self.window is None:
            return jnp.zeros_like(end), end
        return jnp.maximum(first_token - self.window + 1, 0) // self.kv, end


def blockwise_attention(
    query: Array,
    key: Array,
    value: Array,
    query_segment_ids: Array | None,
    key_segment_ids: Array | None,
    *,
    window: int | None = None,
    block_q: int = 256,
    block_kv: int = 256,
) -> Array:
    """`reference_attention` for any device, made for the CPU.

    Args:
        query: [B, H, S, N].
        key: [B, K, S, N]; K divides H, and consecutive query heads share a key head.
        value: [B, K, S, N].
        query_segment_ids: int32 [B, S], or None when all tokens of a sequence may see each other.
        key_segment_ids: int32 [B, S], given with `query_segment_ids`.
        window: how many of the latest tokens a query sees, itself included; None for all earlier ones.
        block_q: tokens per block of queries; more than S is S. The defaults were the fastest of five at S = 2048
            (scripts/bench_attention).
        block_kv: tokens per block of keys; likewise.

    Returns:
        [B, H, S, N], in query's dtype.

    Raises:
        ValueError: all that `check_blockwise` finds, or shapes that do not go together.
    """
    segment_shapes = [None if ids is None else ids.shape for ids in (query_segment_ids, key_segment_ids)]
    problems = check_shapes(query.shape, key.shape, value.shape, *segment_shapes)
    problems += check_blockwise(window=window, block_q=block_q, block_kv=block_kv)
    if problems:
        raise ValueError("blockwise attention: " + "\n".join(problems))
    seq_len = query.shape[2]
    blocks = _Blocks(seq_len, window, min(block_q, seq_len), min(block_kv, seq_len))
    segments = None if query_segment_ids is None else (query_segment_ids, key_segment_ids)
    return _blockwise(blocks, query, key, value, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(blocks: _Blocks, query: Array, key: Array, value: Array, segments: Any) -> Array:
    return _blockwise_forward(blocks, query, key, value, segments)[0]


def _blockwise_forward(blocks: _Blocks, query: Array, key: Array, value: Array, segments: Any) -> Any:
    per_head = functools.partial(_forward_of_head, blocks)
    out, log_sum_exp = _over_heads(blocks, per_head, (query,), (key, value), segments)
    out = out.reshape(query.shape[:2] + out.shape[-2:])[:, :, : blocks.seq_len]
    log_sum_exp = log_sum_exp.reshape(query.shape[:2] + log_sum_exp.shape[-1:])[:, :, : blocks.seq_len]
    return out, (query, key, value, segments, out, log_sum_exp)


def _blockwise_backward(blocks: _Blocks, residuals: Any, out_grad: Array) -> Any:
    query, key, value, segments, out, log_sum_exp = residuals
    # What the softmax's normalization takes from each score's gradient: sum over keys of probability times gradient.
    mean_grad = jnp.sum(out.astype(jnp.float32) * out_grad.astype(jnp.float32), axis=-1)
    per_head = functools.partial(_backward_of_head, blocks)
    by_query = (query, out_grad, log_sum_exp, mean_grad)
    grads = _over_heads(blocks, per_head, by_query, (key, value), segments)
    shapes = [x.shape[:2] for x in (query, key, value)]
    grads = [g.reshape(heads + g.shape[-2:])[:, :, : blocks.seq_len] for g, heads in zip(grads, shapes, strict=True)]
    return (*grads, None)


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _over_heads(blocks: _Blocks, per_head: Any, by_query: Any, by_key: Any, segments: Any) -> Any:
    """Calls `per_head` for each sequence and key head, with its [G, S, ...] query heads, one after the other.

    Tokens are filled up to whole blocks. No query of ours sees the added keys, which come later than all of them; what
    added queries give is cut off, and as gradients of zero they give nothing.
    """
    batch, num_kv_heads = by_key[0].shape[:2]
    rows = batch * num_kv_heads
    by_query = [_filled(x, 2, blocks.num_q * blocks.q) for x in by_query]
    by_query = [x.reshape(rows, -1, *x.shape[2:]) for x in by_query]
    by_key = [_filled(x, 2, blocks.num_kv * blocks.kv) for x in by_key]
    by_key = [x.reshape(rows, *x.shape[2:]) for x in by_key]
    if segments is not None:
        segments = (
            _filled(segments[0], 1, blocks.num_q * blocks.q),
            _filled(segments[1], 1, blocks.num_kv * blocks.kv),
        )

    def one(row: Any) -> Any:
        index, queries, keys = row
        own = None if segments is None else tuple(x[index // num_kv_heads] for x in segments)
        return per_head(queries, keys, own)

    return lax.map(one, (jnp.arange(rows), by_query, by_key))


def _filled(x: Array, dim: int, size: int) -> Array:
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[dim] if i == dim else 0) for i in range(x.ndim)])


def _forward_of_head(blocks: _Blocks, by_query: Any, by_key: Any, segments: Any) -> tuple[Array, Array]:
    """Result [G, S, N] and log of the softmax's denominator [G, S]."""
    (query,), (key, value) = by_query, by_key
    group, tokens, head_dim = query.shape
    rows = group * blocks.q

    def q_block(q_index: Array, done: Any) -> Any:
        queries = _load(query, q_index, blocks.q, 1).reshape(rows, head_dim) / math.sqrt(head_dim)

        def kv_block(kv_index: Array, so_far: Any) -> Any:
            maximum, denominator, mixed = so_far
            visible = _visible(blocks, q_index, kv_index, segments)
            scores = _masked(queries @ _load(key, kv_index, blocks.kv, 0).T, visible, _LOWEST)
            new_maximum = jnp.maximum(maximum, scores.max(-1))
            # Masked once more: in a block that hides all keys from a query, its maximum is the lowest, too.
            weights = _masked(jnp.exp(scores - new_maximum[:, None]), visible, 0.0)
            kept = jnp.exp(maximum - new_maximum)
            mixed = mixed * kept[:, None] + weights @ _load(value, kv_index, blocks.kv, 0)
            return new_maximum, denominator * kept + weights.sum(-1), mixed

        start = (jnp.full(rows, _LOWEST, jnp.float32), _zeros(rows), _zeros(rows, head_dim))
        maximum, denominator, mixed = lax.fori_loop(*blocks.key_blocks(q_index), kv_block, start)
        out, log_sum_exp = done
        return (
            _store(out, mixed / denominator[:, None], q_index),
            _store(log_sum_exp, maximum + jnp.log(denominator), q_index),
        )

    done = (jnp.zeros(query.shape, query.dtype), _zeros(group, tokens))
    return lax.fori_loop(0, blocks.num_q, q_block, done)


def _backward_of_head(blocks: _Blocks, by_query: Any, by_key: Any, segments: Any) -> tuple[Array, Array, Array]:
    """Gradients of query [G, S, N], key [S, N] and value [S, N]."""
    (query, out_grad, log_sum_exp, mean_grad), (key, value) = by_query, by_key
    group, _, head_dim = query.shape
    rows = group * blocks.q

    def q_block(q_index: Array, done: Any) -> Any:
        query_grad, *key_and_value_grads = done
        queries = _load(query, q_index, blocks.q, 1).reshape(rows, head_dim) / math.sqrt(head_dim)
        out_grads = _load(out_grad, q_index, blocks.q, 1).reshape(rows, head_dim)
        shift = _load(log_sum_exp, q_index, blocks.q, 1).reshape(rows, 1)
        means = _load(mean_grad, q_index, blocks.q, 1).reshape(rows, 1)

        def kv_block(kv_index: Array, so_far: Any) -> Any:
            query_grads, key_grad, value_grad = so_far
            keys = _load(key, kv_index, blocks.kv, 0)
            visible = _visible(blocks, q_index, kv_index, segments)
            weights = _masked(jnp.exp(queries @ keys.T - shift), visible, 0.0)
            score_grads = weights * (out_grads @ _load(value, kv_index, blocks.kv, 0).T - means)
            return (
                query_grads + score_grads @ keys,
                _add(key_grad, score_grads.T @ queries, kv_index),
                _add(value_grad, weights.T @ out_grads, kv_index),
            )

        start = (_zeros(rows, head_dim), *key_and_value_grads)
        query_grads, *rest = lax.fori_loop(*blocks.key_blocks(q_index), kv_block, start)
        return (_store(query_grad, query_grads / math.sqrt(head_dim), q_index), *rest)

    done = (jnp.zeros(query.shape, query.dtype), _zeros(*key.shape), _zeros(*value.shape))
    query_grad, key_grad, value_grad = lax.fori_loop(0, blocks.num_q, q_block, done)
    return query_grad, key_grad.astype(key.dtype), value_grad.astype(value.dtype)


def _visible(blocks: _Blocks, q_index: Array, kv_index: Array, segments: Any) -> Array:
    """Which keys of a block the queries of a block see, [block_q, block_kv]."""
    age = (q_index * blocks.q + jnp.arange(blocks.q))[:, None] - (kv_index * blocks.kv + jnp.arange(blocks.kv))
    visible = age >= 0
    if blocks.window is not None:
        visible &= age < blocks.window
    if segments is not None:
        queries = lax.dynamic_slice_in_dim(segments[0], q_index * blocks.q, blocks.q)
        keys = lax.dynamic_slice_in_dim(segments[1], kv_index * blocks.kv, blocks.kv)
        visible &= queries[:, None] == keys
    return visible


def _masked(scores: Array, visible: Array, hidden: float) -> Array:
    """Scores [G * block_q, block_kv], hidden where not visible; query heads of a group see the same."""
    grouped = scores.reshape(-1, *visible.shape)
    return jnp.where(visible, grouped, hidden).reshape(scores.shape)


def _zeros(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.float32)


def _load(x: Array, index: Array, size: int, axis: int) -> Array:
    """One block of tokens, in fp32."""
    return lax.dynamic_slice_in_dim(x, index * size, size, axis).astype(jnp.float32)


def _store(x: Array, block: Array, index: Array) -> Array:
    """Writes the rows of one block of queries into [G, S, ...]."""
    block = block.reshape(x.shape[0], -1, *x.shape[2:]).astype(x.dtype)
    return lax.dynamic_update_slice_in_dim(x, block, index * block.shape[1], 1)


def _add(x: Array, block: Array, index: Array) -> Array:
    """Adds one block of keys to [S, N]."""
    start = index * block.shape[0]
    return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(x, start, block.shape[0]) + block, start, 0)
