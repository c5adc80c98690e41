"""What the training step asks of an optimizer.

Key idea: an optimizer holds numbers only. Its state is a dict of tensors that the caller keeps, and an update is a pure
function, so that it can be traced into the step's graph and its buffers donated.
"""

from typing import Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]


class Optimizer(Protocol):
    """The update rule of one parameter."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors: each has the parameter's shape and dtype, and is zero before the first update."""
        ...

    def update(
        self, param: Tensor, grad: Tensor, state: State, *, lr: Tensor, count: Tensor, decay: bool
    ) -> tuple[Tensor, State]:
        """One update; nothing is changed in place.

        Args:
            param: any shape, floating point; narrower types are computed in float32 and rounded at the end.
            grad: of the parameter's shape.
            state: as `init` or the previous update returned it.
            lr: learning rate, 0-d float32.
            count: number of this update, counted from 1, 0-d int32.
            decay: whether this parameter is subject to weight decay.

        Returns:
            The new parameter and the new state, in the dtypes of the old ones.
        """
        ...


def compute_dtype(param: Tensor) -> torch.dtype:
    """The dtype that an update is computed in: float32, or the parameter's own where that is wider."""
    return torch.promote_types(param.dtype, torch.float32)
