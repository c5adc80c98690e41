"""Model FLOPs per token: what a step must compute, whatever the program does to compute it.

Source: PaLM (Chowdhery et al. 2022), appendix B: 6 FLOPs per matmul parameter and token (2 forward, 4 backward), and
12 · layers · heads · head_dim · seq_len for attention's two products. That "full" convention counts the masked half of
causal attention too, as PaLM and TorchTitan do; the "causal" one leaves it out.
"""

import dataclasses

from torch import nn

from tpu_train.models.counting import attention_width, matmul_parameters


@dataclasses.dataclass(frozen=True)
class FlopsPerToken:
    """Forward and backward FLOPs per token under both conventions of attention."""

    full: int
    causal: int


def flops_per_token(model: nn.Module, seq_len: int) -> FlopsPerToken:
    """FLOPs per token of training `model` at `seq_len` tokens per sequence."""
    products = 6 * matmul_parameters(model)
    attention = 12 * attention_width(model) * seq_len
    return FlopsPerToken(full=products + attention, causal=products + attention // 2)
