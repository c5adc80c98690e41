"""Stochastic gradient descent with momentum as a pure function, with the formulas of `torch.optim.SGD`.

Key idea: a momentum buffer of zeros gives the same first step as torch's, which starts it with the first gradient.
"""

import dataclasses

from torch import Tensor

from tpu_train.optim.optimizer import State, compute_dtype


@dataclasses.dataclass(frozen=True)
class Sgd:
    """SGD; see `Optimizer` for the methods.

    Attributes:
        momentum: in [0, 1); 0 keeps no state.
        weight_decay: times the parameter is added to the gradient.
    """

    momentum: float
    weight_decay: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The momentum buffer, if there is momentum."""
        return ("momentum",) if self.momentum else ()

    def update(
        self, param: Tensor, grad: Tensor, state: State, *, lr: Tensor, count: Tensor, decay: bool
    ) -> tuple[Tensor, State]:
        """One update; see `Optimizer.update`."""
        del count  # of the interface; plain SGD corrects no bias
        dtype = compute_dtype(param)
        weight, step = param.to(dtype), grad.to(dtype)
        if decay and self.weight_decay:
            step = step + weight * self.weight_decay
        new_state: State = {}
        if self.momentum:
            step = state["momentum"].to(dtype) * self.momentum + step
            new_state["momentum"] = step.to(param.dtype)
        return (weight - lr * step).to(param.dtype), new_state
