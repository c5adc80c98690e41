"""The loss where each device along `tensor` has a part of the vocabulary, with logits and without.

Key idea: of a row's logits three numbers cross the axis (the largest, the sum of exponentials, the label's logit), and
each device's derivative needs nothing of the others'. The fused kernels give two numbers a row, a log-sum-exp and the
label's logit, so that the same combination serves them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpu_train.sharding.collectives import all_reduce, axis_index
from tpu_train.sharding.mesh import MeshShape
from tpu_train.sharding.tensor_parallel import local_ids, own_rows

_AXIS = "tensor"

# (x [R, D], weight [V, D], labels int32 [R], num_columns int32 or None) -> float32 log-sum-exp and label's logit, [R]
# each; a label outside of 0..V-1 has the logit 0; see `kernels.loss`.
LinearLogsumexp = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum of the cross-entropy over rows, of logits [R, V / tensor]: three numbers a row cross the axis, no logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, vocab_size: int, mesh: MeshShape
    ) -> Tensor:
        num_columns, axes, size = logits.shape[1], (_AXIS,), mesh.tensor
        logits = logits.masked_fill(~own_rows(vocab_size, num_columns, axes, mesh), -torch.inf)
        top = all_reduce(logits.amax(1), axes, size, "loss", "max")
        local, here = local_ids(labels, num_columns)
        valid = labels != ignore_index
        picked = logits.gather(1, local.unsqueeze(1)).squeeze(1)
        parts = torch.stack([(logits - top.unsqueeze(1)).exp().sum(1), torch.where(here, picked, 0)])
        total, target = all_reduce(parts, axes, size, "loss").unbind(0)
        logsumexp = top + total.log()
        # A label that is nowhere: PyTorch raises; here the loss becomes nan, which the finiteness check sees.
        exists = (labels >= 0) & (labels < vocab_size)
        ctx.save_for_backward(logits, logsumexp, local, here & valid, valid)
        return torch.where(valid, logsumexp - torch.where(exists, target, torch.nan), 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        logits, logsumexp, local, hit, valid = ctx.saved_tensors
        columns = torch.arange(logits.shape[1], dtype=local.dtype)
        one_hot = (columns == local.unsqueeze(1)) & hit.unsqueeze(1)
        softmax = (logits - logsumexp.unsqueeze(1)).exp()
        return (softmax - one_hot.to(logits.dtype)) * torch.where(valid, grad, 0).unsqueeze(1), None, None, None, None


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, vocab_size: int, mesh: MeshShape
) -> Tensor:
    """`F.cross_entropy(..., reduction="sum")` of logits [R, V / tensor] whose vocabulary is split over `tensor`.

    Args:
        logits: float32, this device's columns.
        labels: int [R], of the whole vocabulary.
        ignore_index: the label without a target.
        vocab_size: columns that exist; padded ones are left out.
        mesh: its shape.
    """
    return _VocabularyCrossEntropy.apply(logits, labels, ignore_index, vocab_size, mesh)  # type: ignore[return-value]


class _Combine(torch.autograd.Function):
    """Log-sum-exp and label's logit over the whole vocabulary, of those over each device's part."""

    @staticmethod
    def forward(ctx: Any, logsumexp: Tensor, picked: Tensor, size: int) -> tuple[Tensor, Tensor]:
        top = all_reduce(logsumexp, (_AXIS,), size, "loss", "max")
        parts = torch.stack([(logsumexp - top).exp(), picked])
        total, label = all_reduce(parts, (_AXIS,), size, "loss").unbind(0)
        whole = top + total.log()
        ctx.save_for_backward((logsumexp - whole).exp())
        return whole, label

    @staticmethod
    def backward(ctx: Any, grad_logsumexp: Tensor, grad_picked: Tensor) -> Any:  # type: ignore[override]
        (share,) = ctx.saved_tensors
        return grad_logsumexp * share, grad_picked, None


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int,
    *,
    kernel: LinearLogsumexp,
    vocab_size: int,
    mesh: MeshShape,
) -> Tensor:
    """Sum of the cross-entropy over rows, of features and output weight, without the logits.

    Args:
        x: [R, D].
        weight: [V, D], or this device's rows of it.
        labels: int [R], of the whole vocabulary.
        ignore_index: the label without a target.
        kernel: gives the two numbers of a row.
        vocab_size: rows that the whole weight has, without padding.
        mesh: its shape.
    """
    valid = labels != ignore_index
    # A label that is nowhere: PyTorch raises; here the loss becomes nan, which the finiteness check sees.
    exists = (labels >= 0) & (labels < vocab_size)
    local = torch.where(exists, labels, -1).to(torch.int32)
    if mesh.tensor == 1:
        logsumexp, picked = kernel(x, weight, local, None)
    else:
        num_rows = weight.shape[0]
        start = axis_index(_AXIS) * num_rows
        num_columns = (vocab_size - start).clamp(min=0, max=num_rows)
        logsumexp, picked = kernel(x, weight, torch.where(exists, local - start, -1), num_columns)
        logsumexp, picked = _Combine.apply(logsumexp, picked, mesh.tensor)  # type: ignore[misc]
    return torch.where(valid, logsumexp - torch.where(exists, picked, torch.nan), 0).sum()
