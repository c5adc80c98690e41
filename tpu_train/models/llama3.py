"""Llama 3, 3.1 and 3.2 (Grattafiori et al. 2024, arXiv:2407.21783), text only.

Key idea: the whole architecture is the one expression below; sizes come from `conf/model/llama3_*.yaml`.
"""

import math
from collections.abc import Mapping

from torch import nn

from tpu_train.models.attention import Attention, ScaledDotProductAttention
from tpu_train.models.decoder import Decoder, DecoderLayer
from tpu_train.models.feed_forward import FeedForward
from tpu_train.models.linear import Embedding, Linear
from tpu_train.models.node import Node, node
from tpu_train.models.norm import RMSNorm
from tpu_train.models.rotary import RotaryEmbedding


def llama3(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_dim: int,
    vocab_size: int,
    rope_theta: float,
    norm_eps: float,
    tie_embeddings: bool,
    rope_scaling: Mapping[str, float] | None = None,
    init_std: float = 0.02,
    dropout: float = 0.0,
) -> Node:
    """The config tree of a Llama 3 model.

    Args:
        dim: D.
        num_layers: L.
        num_heads: H.
        num_kv_heads: K.
        head_dim: N.
        ffn_dim: F.
        vocab_size: V.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
        tie_embeddings: whether the output projection is the embedding.
        rope_scaling: the arguments of `rotary.scale_frequencies`, or None.
        init_std: standard deviation of initial weights. That of the projections that end a residual branch is divided
            by sqrt(2 L), so that the sum of all branches starts at the scale of one (GPT-2, Radford et al. 2019).
        dropout: probability of dropping an element of each residual branch.
    """
    branch_std = init_std / math.sqrt(2 * num_layers)
    norm = node(RMSNorm, dim=dim, eps=norm_eps)
    attention = node(
        Attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        query=node(Linear, in_dim=dim, out_dim=num_heads * head_dim, init_std=init_std),
        key=node(Linear, in_dim=dim, out_dim=num_kv_heads * head_dim, init_std=init_std),
        value=node(Linear, in_dim=dim, out_dim=num_kv_heads * head_dim, init_std=init_std),
        core=node(ScaledDotProductAttention),
        output=node(Linear, in_dim=num_heads * head_dim, out_dim=dim, init_std=branch_std),
    )
    feed_forward = node(
        FeedForward,
        gate=node(Linear, in_dim=dim, out_dim=ffn_dim, init_std=init_std),
        up=node(Linear, in_dim=dim, out_dim=ffn_dim, init_std=init_std),
        down=node(Linear, in_dim=ffn_dim, out_dim=dim, init_std=branch_std),
    )
    layer = node(
        DecoderLayer,
        attention_norm=norm,
        attention=attention,
        feed_forward_norm=norm,
        feed_forward=feed_forward,
        dropout=node(nn.Dropout, p=dropout) if dropout else node(nn.Identity),
    )
    return node(
        Decoder,
        embedding=node(Embedding, vocab_size=vocab_size, dim=dim, init_std=init_std),
        rotary=node(RotaryEmbedding, head_dim=head_dim, theta=rope_theta, scaling=rope_scaling),
        layers=(layer,) * num_layers,
        norm=norm,
        output=None if tie_embeddings else node(Linear, in_dim=dim, out_dim=vocab_size, init_std=init_std),
    )
