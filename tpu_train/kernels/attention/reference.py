"""What attention means, in PyTorch: the definition that every implementation is held to.

Key idea: which keys a query sees is one boolean array, written out; nothing here is fast, and an S x S array is made.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_segment_ids: Tensor | None = None,
    key_segment_ids: Tensor | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """Mixes values by causal attention within segments; queries and keys are the same tokens.

    Args:
        query: [B, H, S, N].
        key: [B, K, S, N]; K divides H, and consecutive query heads share a key head.
        value: [B, K, S, N].
        query_segment_ids: [B, S], or None when all tokens of a sequence may see each other.
        key_segment_ids: [B, S], given with `query_segment_ids`.
        window: how many of the latest tokens a query sees, itself included; None for all earlier ones.

    Returns:
        [B, H, S, N]: softmax(query · key / sqrt(N)) over the keys a query sees, times value.
    """
    tokens = torch.arange(query.shape[2], device=query.device)
    age = tokens[:, None] - tokens
    visible = age >= 0
    if window is not None:
        visible = visible & (age < window)
    if query_segment_ids is not None and key_segment_ids is not None:
        visible = visible & (query_segment_ids[:, None, :, None] == key_segment_ids[:, None, None, :])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, enable_gqa=True)
