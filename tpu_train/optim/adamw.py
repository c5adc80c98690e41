"""AdamW (Loshchilov and Hutter, arXiv:1711.05101) as a pure function, with the formulas of `torch.optim.AdamW`.

Key idea: learning rate and count are tensors, so one captured graph serves every step. The bias corrections are
computed from the count in float32 without the cancellation of `1 - beta**count`, which at count 1 and beta 0.999 loses
three digits.
"""

import dataclasses
import math

import torch
from torch import Tensor

from tpu_train.optim.optimizer import State, compute_dtype


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW; see `Optimizer` for the methods.

    Moments have the parameter's dtype. In bfloat16 a step of 1 - beta2 below 2^-9 is rounded away, so the second moment
    of bfloat16 parameters wants beta2 of at most about 0.99.

    Attributes:
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the corrected second moment.
        weight_decay: each update first multiplies the parameter by 1 - lr * weight_decay.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def slots(self) -> tuple[str, ...]:
        """First and second moment."""
        return ("mu", "nu")

    def update(
        self, param: Tensor, grad: Tensor, state: State, *, lr: Tensor, count: Tensor, decay: bool
    ) -> tuple[Tensor, State]:
        """One update; see `Optimizer.update`."""
        dtype = compute_dtype(param)
        weight, grad, mu, nu = (t.to(dtype) for t in (param, grad, state["mu"], state["nu"]))
        if decay and self.weight_decay:
            weight = weight * (1 - lr * self.weight_decay)
        mu = _lerp(mu, grad, 1 - self.beta1)
        nu = nu * self.beta2 + grad * grad * (1 - self.beta2)
        step_size = lr / bias_correction(self.beta1, count, lr.dtype)
        root = nu.sqrt() / bias_correction(self.beta2, count, lr.dtype).sqrt()
        weight = weight - step_size * mu / (root + self.eps)
        return weight.to(param.dtype), {"mu": mu.to(param.dtype), "nu": nu.to(param.dtype)}


def bias_correction(beta: float, count: Tensor, dtype: torch.dtype) -> Tensor:
    """`1 - beta**count`, accurate to a few units in the last place.

    Args:
        beta: in [0, 1).
        count: from 1, 0-d integer.
        dtype: of the 0-d result.
    """
    count = count.to(dtype)
    if beta == 0:
        return torch.ones_like(count)
    return -torch.expm1(count * math.log(beta))


def _lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """`torch.lerp`, whose two forms keep the result exact at weight 0 and at weight 1."""
    if weight < 0.5:
        return start + (end - start) * weight
    return end - (end - start) * (1 - weight)
