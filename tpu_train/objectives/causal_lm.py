"""Next-token cross-entropy of a language model, and for a mixture of experts the load-balancing loss.

Key idea: what the routers did is collected around the call of the model (`models.moe`), as sums that microbatches and
devices add up; numbers such as a maximum are taken of the whole step's sums, in `report`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tpu_train.models.decoder import Decoder
from tpu_train.models.moe import Routing, collect_routing, load_balancing_loss
from tpu_train.objectives.base import Batch, LossSum

IGNORED_LABEL = -100  # PyTorch's and transformers' convention for "no target here"

# Of LossSum.metrics.
ROUTER_SUMS = _AUX_LOSS, _COUNTS, _DROPPED = "router_aux_loss", "router_counts", "router_dropped"

# (logits float32 [R, V], labels int [R], ignore_index) -> 0-d sum of the cross-entropy over rows with a target.
CrossEntropy = Callable[[Tensor, Tensor, int], Tensor]

# (features [R, D], output weight [V, D], labels int [R], ignore_index) -> the same.
LinearCrossEntropy = Callable[[Tensor, Tensor, Tensor, int], Tensor]


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
        linear_cross_entropy: of the model's features and output weight (`models.decoder.Decoder`), in its place.
    """

    cross_entropy: CrossEntropy = summed_cross_entropy
    linear_cross_entropy: LinearCrossEntropy | None = None
    sequence_dims: Mapping[str, int | None] = dataclasses.field(default_factory=dict)

    def weight(self, batch: Batch) -> Tensor:
        """Number of labels that are not ignored, 0-d float32."""
        return (batch["labels"] != IGNORED_LABEL).sum().float()

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """Sum of the cross-entropy over valid labels; the softmax is taken in float32.

        Where routers have a load-balancing loss and the model is in training mode, it is added, times its coefficient
        and the number of valid labels: divided by the step's number, it becomes the mean over the microbatches (of each
        device) of each one's own loss, weighted by their valid labels.
        """
        tokens, labels = batch["tokens"], batch["labels"]
        positions = batch.get("positions")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32).expand(tokens.shape)
        with collect_routing() as layers:
            total = self._cross_entropy(model, labels.flatten().long(), tokens, positions, batch.get("segment_ids"))
        weight = self.weight(batch)
        if not layers:
            return LossSum(total, weight)
        balance = load_balancing_loss(layers)
        if model.training and layers[0].aux_loss_coef:
            total = total + layers[0].aux_loss_coef * balance * weight
        return LossSum(total, weight, {_AUX_LOSS: balance * weight, **_routing_sums(layers)})

    def _cross_entropy(self, model: nn.Module, labels: Tensor, *inputs: Tensor | None) -> Tensor:
        if self.linear_cross_entropy is None:
            logits = model(*inputs)
            return self.cross_entropy(logits.float().flatten(0, 1), labels, IGNORED_LABEL)
        if not isinstance(model, Decoder):
            raise ValueError(
                f"the fused loss takes a Decoder, not a {type(model).__name__}; use kernels/loss=reference"
            )
        features = model.features(*inputs)  # type: ignore[arg-type]
        return self.linear_cross_entropy(features.flatten(0, 1), model.output_weight, labels, IGNORED_LABEL)

    def report(self, sums: Mapping[str, Tensor], weight: Tensor) -> Mapping[str, Tensor]:
        """For a mixture of experts what its routers did in the whole step; else nothing.

        * `router_aux_loss`: the load-balancing loss before its coefficient, mean as in `loss`; top_k when balanced.
        * `router_load_max`, `router_load_min`: assignments of the busiest and of the idlest expert of a layer, over
          those of a balanced one; means over the layers. 1 when balanced; 0: an expert of each layer got none.
        * `router_dropped`: assignments that no expert computed, over all layers; 0, as nothing is dropped.
        """
        if _COUNTS not in sums:
            return {}
        counts = sums[_COUNTS]
        load = counts / counts.mean(1, keepdim=True)
        return {
            _AUX_LOSS: sums[_AUX_LOSS] / weight.clamp(min=1),
            "router_load_max": load.amax(1).mean(),
            "router_load_min": load.amin(1).mean(),
            _DROPPED: sums[_DROPPED],
        }


def _routing_sums(layers: Sequence[Routing]) -> dict[str, Tensor]:
    """Assignments per layer and expert [L, E], float32 as collectives add them: exact up to 2^24 each."""
    counts = torch.stack([layer.counts for layer in layers])
    dropped = sum(layer.num_rows * layer.top_k - layer.counts.sum() for layer in layers)
    assert isinstance(dropped, Tensor)
    return {_COUNTS: counts.float(), _DROPPED: dropped.float()}
