"""What the fused projection and loss computes, in plain PyTorch, and the loss that is made of it.

The definition the kernels are tested against: all logits in memory, in fp32 (fp64 for fp64 inputs).
"""

import torch
from torch import Tensor


def linear_logsumexp(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    num_columns: Tensor | None = None,
    *,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of each row's logits, and the logit of its label.

    Args:
        x: [R, D] hidden states.
        weight: [V, D] of the projection; under a vocabulary-parallel layout this shard's rows.
        labels: [R], counted from the weight's first row; any value outside 0..V-1 picks nothing.
        num_columns: scalar, how many of the weight's rows exist, where a shard is padded; the rest count as -inf.
        soft_cap: logits become `soft_cap * tanh(logits / soft_cap)`.

    Returns:
        fp32 `logsumexp` [R] and `picked` [R]; `picked` is 0 where the label picks nothing.
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(precise) @ weight.to(precise).T
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    columns = torch.arange(weight.shape[0], device=x.device)
    exists = columns < (weight.shape[0] if num_columns is None else num_columns)
    logsumexp = logits.masked_fill(~exists, -torch.inf).logsumexp(dim=1)
    is_label = (labels[:, None] == columns) & exists
    return logsumexp, logits.masked_fill(~is_label, 0).sum(dim=1)


def combine_shards(logsumexp: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
    """The two vectors [R] over the whole vocabulary from those of its shards, [shards, R].

    Over a mesh axis: `m = all-reduce-max(logsumexp)` without a gradient, `m + log(all-reduce-sum(exp(logsumexp - m)))`,
    and `all-reduce-sum(picked)`.
    """
    return logsumexp.logsumexp(dim=0), picked.sum(dim=0)


def cross_entropy_sum(logsumexp: Tensor, picked: Tensor, valid: Tensor, *, z_loss: float = 0.0) -> Tensor:
    """The sum over valid rows of `logsumexp - picked + z_loss * logsumexp²`.

    Args:
        logsumexp: [R], over the whole vocabulary.
        picked: [R], the labels' logits.
        valid: [R] bools, rows that count; the others' labels are ignored.
        z_loss: weight of the term that keeps logits near zero (PaLM, section 5: 1e-4).
    """
    loss = logsumexp - picked + z_loss * logsumexp**2
    return loss.masked_fill(~valid, 0).sum()
