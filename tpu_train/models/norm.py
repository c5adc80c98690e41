"""Root-mean-square normalization (Zhang and Sennrich 2019, arXiv:1910.07467).

Key idea: the statistics are taken in fp32 whatever the compute dtype, and the result is rounded before the weight is
applied, which is the order of the published checkpoints' reference code.
"""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Scales vectors to a root mean square of one, then by a learned weight."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight to one, in place."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes the last dimension of [..., dim]."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)
