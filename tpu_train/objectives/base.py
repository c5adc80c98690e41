"""The interface of an objective: a sum and its weight, never a mean.

Key idea: a mean over a microbatch, or over one device's rows, is wrong as soon as they hold different numbers of valid
targets. So an objective returns a sum; the step divides it by the weight of the whole global step.
"""

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class LossSum:
    """The loss of some rows.

    Attributes:
        total: 0-d float32, the sum of the loss over valid targets.
        weight: 0-d float32, the number of valid targets.
        metrics: float32 tensors that are summed over microbatches and devices; `Objective.report` takes the sums.
    """

    total: Tensor
    weight: Tensor
    metrics: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


class Objective(Protocol):
    """A loss over batches. Random draws are ordinary torch calls; a captured step gives them their keys.

    Attributes:
        sequence_dims: of each field of a batch the dimension that counts sequences, which is laid over the devices;
            None: every device has the whole field. Fields that are not named have it first.
    """

    @property
    def sequence_dims(self) -> Mapping[str, int | None]:
        """See above."""
        ...

    def weight(self, batch: Batch) -> Tensor:
        """0-d float32: the number of valid targets of the batch, without running the model."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> LossSum:
        """The loss of the batch's rows."""
        ...

    def report(self, sums: Mapping[str, Tensor], weight: Tensor) -> Mapping[str, Tensor]:
        """What the metrics line says besides, 0-d each: of a whole step's sums of `LossSum.metrics` and its weight."""
        ...
