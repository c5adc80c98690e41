"""Next-token cross-entropy of a language model."""

import dataclasses
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpu_train.objectives.base import Batch, LossSum

IGNORED_LABEL = -100  # PyTorch's and transformers' convention for "no target here"


# (logits float32 [R, V], labels int [R], ignore_index) -> 0-d sum of the cross-entropy over rows with a target.
CrossEntropy = Callable[[Tensor, Tensor, int], Tensor]


def summed_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """PyTorch's own."""
    return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


@dataclasses.dataclass(frozen=True)
class CausalLm:
    """Cross-entropy in nats, summed over the labels that are not ignored.

    A batch holds `tokens` and `labels`, both int[B, S]; `labels[b, s]` is the target of position s, already shifted, or
    -100 for none. `positions` int[B, S] defaults to 0..S-1 per row, `segment_ids` int[B, S] to one document per row.

    Attributes:
        cross_entropy: of the logits that the model gives; on a mesh each device may have a part of the vocabulary.
    """

    cross_entropy: CrossEntropy = summed_cross_entropy
    sequence_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def weight(self, batch: Batch) -> Tensor:
        """Number of labels that are not ignored, 0-d float32."""
        return (batch["labels"] != IGNORED_LABEL).sum().float()

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum of the cross-entropy over valid labels; the softmax is taken in float32."""
        tokens, labels = batch["tokens"], batch["labels"]
        positions = batch.get("positions")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32).expand(tokens.shape)
        logits = model(tokens, positions, batch.get("segment_ids"))
        total = self.cross_entropy(logits.float().flatten(0, 1), labels.flatten().long(), IGNORED_LABEL)
        return LossSum(total, self.weight(batch))
