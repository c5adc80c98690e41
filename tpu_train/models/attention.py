"""Self-attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245).

Key idea: the core — everything between the projected heads and the mixed heads — is a child of its own that is told
*which* tokens may see each other (segment ids and a cursor), not given a mask; a kernel that skips blocks can take its
place.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpu_train.models.cache import LayerCache
from tpu_train.models.rotary import rotate


class ScaledDotProductAttention(nn.Module):
    """The reference attention core."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_segment_ids: Tensor | None = None,
        key_segment_ids: Tensor | None = None,
        cursor: Tensor | int | None = None,
    ) -> Tensor:
        """Mixes values by causal attention within segments.

        Args:
            query: [B, H, S, N].
            key: [B, K, T, N]; K divides H, and consecutive query heads share a key head.
            value: [B, K, T, N].
            query_segment_ids: [B, S], or None when all tokens of a sequence may see each other.
            key_segment_ids: [B, T], given with `query_segment_ids`.
            cursor: index among the keys of the first query; None means that keys and queries are the same tokens.

        Returns:
            [B, H, S, N].
        """
        mask = None
        if query_segment_ids is not None or cursor is not None:
            mask = _visible(query, key, query_segment_ids, key_segment_ids, cursor)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=query.shape[1] != key.shape[1]
        )


class Attention(nn.Module):
    """Projections to heads, rotary positions, the core, and the projection back."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        core: nn.Module,
        output: nn.Module,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
    ):
        """Takes the children.

        Args:
            num_heads: H.
            num_kv_heads: K; divides H.
            head_dim: N; need not be D / H.
            query: D to H*N.
            key: D to K*N.
            value: D to K*N.
            core: as `ScaledDotProductAttention`.
            output: H*N to D.
            query_norm: norm over N of each query head before rotation, or None.
            key_norm: norm over N of each key head before rotation, or None.
        """
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.query = query
        self.key = key
        self.value = value
        self.query_norm = query_norm
        self.key_norm = key_norm
        self.core = core
        self.output = output

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        segment_ids: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Maps [B, S, D] to [B, S, D].

        Args:
            x: [B, S, D].
            cos: [B, S, 1, N/2], from `RotaryEmbedding`.
            sin: likewise.
            segment_ids: [B, S]; given whenever there is a cache.
            cache: earlier keys and values; those of `x` are appended.
        """
        # As many heads as the projections give: laid over devices, each has a part of them.
        query = self.query(x).unflatten(-1, (-1, self.head_dim))
        key = self.key(x).unflatten(-1, (-1, self.head_dim))
        value = self.value(x).unflatten(-1, (-1, self.head_dim))
        if self.query_norm is not None:
            query = self.query_norm(query)
        if self.key_norm is not None:
            key = self.key_norm(key)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key_segment_ids, cursor = segment_ids, None
        if cache is not None:
            cache.append(key, value)
            key, value, key_segment_ids, cursor = cache.keys, cache.values, cache.segment_ids, cache.cursor
        heads = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        mixed = self.core(*heads, query_segment_ids=segment_ids, key_segment_ids=key_segment_ids, cursor=cursor)
        return self.output(mixed.transpose(1, 2).flatten(-2))


def _visible(
    query: Tensor,
    key: Tensor,
    query_segment_ids: Tensor | None,
    key_segment_ids: Tensor | None,
    cursor: Tensor | int | None,
) -> Tensor:
    """Which keys each query sees, boolean, broadcastable to [B, 1, S, T]."""
    query_slots = torch.arange(query.shape[2], device=query.device)
    if cursor is not None:
        query_slots = query_slots + cursor
    visible = torch.arange(key.shape[2], device=query.device) <= query_slots[:, None]
    if query_segment_ids is not None and key_segment_ids is not None:
        visible = visible & (query_segment_ids[:, None, :, None] == key_segment_ids[:, None, None, :])
    return visible
