"""Matrix products and the embedding table: everything that owns a weight matrix.

Key idea: the spread of the initial weights is an argument of the layer, so that a model states it where it puts the
layer, and `reset_parameters` only fills `self.weight` in place: it can be traced with any tensor swapped in.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Module):
    """A product with a weight matrix, without bias."""

    def __init__(self, in_dim: int, out_dim: int, init_std: float):
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        if not self.weight.is_meta:  # there are no values there, and "drawing" them imports torch's compiler, a second
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew, in place."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., in_dim] to [..., out_dim]."""
        return F.linear(x, self.weight)


class Embedding(nn.Module):
    """A table with a row per token of the vocabulary."""

    def __init__(self, vocab_size: int, dim: int, init_std: float):
        super().__init__()
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        if not self.weight.is_meta:  # there are no values there, and "drawing" them imports torch's compiler, a second
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weights anew, in place."""
        nn.init.normal_(self.weight, std=self.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token ids [B, S] to their rows [B, S, D]."""
        return F.embedding(tokens, self.weight)
