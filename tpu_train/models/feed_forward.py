"""The gated feed-forward layer (SwiGLU, Shazeer 2020, arXiv:2002.05202).

Key idea: the three projections are children, so that a swap can fuse or quantize them and keep their names.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module):
        super().__init__()
        self.gate = gate
        self.up = up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, D] to [B, S, D] through width F."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
