"""Scaled dot-product attention and its derivative, as formulas that XLA fuses.

Shapes: queries `[B, H, S, N]`, keys and values `[B, K, T, N]` with H a multiple of K; logsumexp float32 `[B, H, S]`.

Key idea: the H / K query heads of one key/value head are laid behind one another in the sequence, a free reshape, so
that grouped-query attention is the same batched product as plain attention and no repeated keys or values exist. The
derivative (Dao, arXiv:2307.08691, section 2.3) recomputes the scores by the same expressions as the forward, which XLA
merges with them where both are in one program.
"""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering.dtypes import compute_dtype
from tpu_train.lowering.ops.matmul import precision

aten = torch.ops.aten


def _product(x: Array, y: Array, x_dim: int, y_dim: int, dtype: jnp.dtype) -> Array:
    """Batched product of `[B, K, ...]` arrays over the named dims, accumulated and returned in `dtype`."""
    dimensions = (((x_dim,), (y_dim,)), ((0, 1), (0, 1)))
    return lax.dot_general(x, y, dimensions, precision=precision(), preferred_element_type=dtype)


def _group(x: Array, kv_heads: int) -> Array:
    """`[B, H, S, ...]` as `[B, K, H/K * S, ...]`."""
    batch, heads, length, *rest = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * length, *rest)


def _scores(query: Array, key: Array, is_causal: bool, attn_mask: Array | None, scale: float | None) -> Array:
    """Scaled and masked scores `[B, K, H/K * S, T]` in float32."""
    batch, heads, length, head_dim = query.shape
    kv_heads, key_length = key.shape[1:3]
    dtype = compute_dtype(query.dtype)
    scores = _product(_group(query, kv_heads), key, 3, 3, dtype)
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
    if not is_causal and attn_mask is None:
        return scores
    grouped, scores = scores.shape, scores.reshape(batch, heads, length, key_length)
    if is_causal:
        row = lax.broadcasted_iota(jnp.int32, (length, key_length), 0)
        column = lax.broadcasted_iota(jnp.int32, (length, key_length), 1)
        scores = jnp.where(row >= column, scores, -jnp.inf)
    if attn_mask is not None:
        scores = scores + attn_mask.astype(dtype)
    return scores.reshape(grouped)


def _check(query: Array, key: Array, dropout_p: float) -> None:
    if dropout_p != 0:
        raise ValueError(
            f"aten::_scaled_dot_product_flash_attention_for_cpu with dropout_p={dropout_p}: allowed is dropout_p=0; "
            "put a dropout layer outside the attention instead"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"aten::_scaled_dot_product_flash_attention_for_cpu with {query.shape[1]} query heads and {key.shape[1]} "
            "key/value heads: the query heads must be a multiple"
        )


def attention(
    query: Array,
    key: Array,
    value: Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array]:
    _check(query, key, dropout_p)
    scores = _scores(query, key, is_causal, attn_mask, scale)
    top = jnp.max(scores, -1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0, top)  # a row that sees nothing: weights and logsumexp 0
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, -1, keepdims=True)
    total = jnp.where(total == 0, 1, total)
    out = _product(weights.astype(value.dtype), value, 3, 2, scores.dtype) / total
    logsumexp = (top + jnp.log(total))[..., 0]
    heads = (query.shape[0], query.shape[1], query.shape[2])
    return out.reshape(*heads, value.shape[3]).astype(query.dtype), logsumexp.reshape(heads)


def attention_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    logsumexp: Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    _check(query, key, dropout_p)
    kv_heads = key.shape[1]
    scores = _scores(query, key, is_causal, attn_mask, scale)
    dtype = scores.dtype
    grad, lse = _group(grad_out, kv_heads), _group(logsumexp, kv_heads)[..., None]
    weights = jnp.exp(scores - lse)
    grad_value = _product(weights.astype(value.dtype), grad, 2, 2, dtype)
    grad_weights = _product(grad, value, 3, 3, dtype)
    # The row sums of grad_weights * weights, from the smaller arrays.
    row = jnp.sum(grad.astype(dtype) * _group(out, kv_heads).astype(dtype), -1, keepdims=True)
    factor = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    grad_scores = (weights * (grad_weights - row) * factor).astype(query.dtype)
    grad_query = _product(grad_scores, key, 3, 2, dtype).reshape(query.shape)
    grad_key = _product(grad_scores, _group(query, kv_heads), 2, 2, dtype)
    return grad_query.astype(query.dtype), grad_key.astype(key.dtype), grad_value.astype(value.dtype)


OPS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
}
