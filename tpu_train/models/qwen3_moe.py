"""Qwen3, the mixture-of-experts models (Yang et al. 2025, arXiv:2505.09388).

Key idea: dense Qwen3 with a routed feed-forward layer in every layer; stated in full here, so that the model can be
read and changed without another. Sizes come from `conf/model/qwen3_{moe_debug,30b,235b}.yaml`.
"""

import math

from torch import nn

from tpu_train.models.attention import Attention, ScaledDotProductAttention
from tpu_train.models.decoder import Decoder, DecoderLayer
from tpu_train.models.linear import Embedding, Linear
from tpu_train.models.moe import Experts, GroupedProduct, MoeFeedForward, Router
from tpu_train.models.node import Node, node
from tpu_train.models.norm import RMSNorm
from tpu_train.models.rotary import RotaryEmbedding


def qwen3_moe(
    *,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_dim: int,
    num_experts: int,
    top_k: int,
    norm_topk_prob: bool,
    vocab_size: int,
    rope_theta: float,
    norm_eps: float,
    tie_embeddings: bool,
    router_aux_loss_coef: float = 0.0,
    init_std: float = 0.02,
    dropout: float = 0.0,
) -> Node:
    """The config tree of a Qwen3-MoE model.

    Args:
        dim: D.
        num_layers: L.
        num_heads: H.
        num_kv_heads: K.
        head_dim: N.
        ffn_dim: F, of one expert.
        num_experts: E.
        top_k: experts per token.
        norm_topk_prob: whether the weights of a token's experts are divided by their sum.
        vocab_size: V.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
        tie_embeddings: whether the output projection is the embedding.
        router_aux_loss_coef: of the load-balancing loss, which the objective adds in training; 0.0: off.
        init_std: standard deviation of initial weights. That of the projections that end a residual branch is divided
            by sqrt(2 L), so that the sum of all branches starts at the scale of one (GPT-2, Radford et al. 2019).
        dropout: probability of dropping an element of each residual branch.
    """
    branch_std = init_std / math.sqrt(2 * num_layers)
    norm = node(RMSNorm, dim=dim, eps=norm_eps)
    head_norm = node(RMSNorm, dim=head_dim, eps=norm_eps)
    attention = node(
        Attention,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        query=node(Linear, in_dim=dim, out_dim=num_heads * head_dim, init_std=init_std),
        key=node(Linear, in_dim=dim, out_dim=num_kv_heads * head_dim, init_std=init_std),
        value=node(Linear, in_dim=dim, out_dim=num_kv_heads * head_dim, init_std=init_std),
        query_norm=head_norm,
        key_norm=head_norm,
        core=node(ScaledDotProductAttention),
        output=node(Linear, in_dim=num_heads * head_dim, out_dim=dim, init_std=branch_std),
    )
    router = node(
        Router, dim=dim, num_experts=num_experts, top_k=top_k, norm_topk_prob=norm_topk_prob, init_std=init_std
    )
    experts = node(
        Experts, num_experts=num_experts, dim=dim, ffn_dim=ffn_dim, init_std=init_std, down_init_std=branch_std
    )
    core, aux = node(GroupedProduct), router_aux_loss_coef
    layer = node(
        DecoderLayer,
        attention_norm=norm,
        attention=attention,
        feed_forward_norm=norm,
        feed_forward=node(MoeFeedForward, router=router, experts=experts, core=core, aux_loss_coef=aux),
        dropout=node(nn.Dropout, p=dropout) if dropout else node(nn.Identity),
    )
    return node(
        Decoder,
        embedding=node(Embedding, vocab_size=vocab_size, dim=dim, init_std=init_std),
        rotary=node(RotaryEmbedding, head_dim=head_dim, theta=rope_theta),
        layers=(layer,) * num_layers,
        norm=norm,
        output=None if tie_embeddings else node(Linear, in_dim=dim, out_dim=vocab_size, init_std=init_std),
    )
