"""Negative log likelihood and its derivative.

Key idea: reading the target's log-probability is a gather of one number per row; its derivative is a comparison with an
iota, which fuses with the derivative of log-softmax, so that the one-hot matrix never exists.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering import intrinsics
from tpu_train.lowering.dtypes import widen

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


def _class_dim(x: Array) -> int:
    return 0 if x.ndim == 1 else 1


def _row_weights(target: Array, weight: Array | None, ignore_index: int, dtype: jnp.dtype) -> Array:
    """The weight of each target's class; 0 where it is ignored."""
    valid = target != ignore_index
    if weight is None:
        return valid.astype(dtype)
    taken = weight.at[jnp.where(valid, target, 0)].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return jnp.where(valid, taken.astype(dtype), 0)


def nll_loss_forward(
    x: Array, target: Array, weight: Array | None, reduction: int, ignore_index: int
) -> tuple[Array, Array]:
    dim = _class_dim(x)
    wide = widen(x)
    safe = jnp.expand_dims(jnp.where(target != ignore_index, target, 0), dim)
    picked = jnp.take_along_axis(wide, safe, dim, mode="promise_in_bounds").squeeze(dim)
    in_range = ((safe >= 0) & (safe < x.shape[dim])).squeeze(dim)
    picked = jnp.where(in_range, picked, jnp.nan)
    weights = _row_weights(target, weight, ignore_index, wide.dtype)
    # A select, not a product: an ignored row may hold inf.
    losses = jnp.where(target != ignore_index, -picked * weights, 0)
    if reduction == _NONE:
        # Nobody reads the total weight of a loss per row; PyTorch fills it in where there is no batch.
        return losses.astype(x.dtype), (weights if x.ndim == 1 else jnp.zeros(())).astype(x.dtype)
    total = jnp.sum(losses)
    total_weight = jnp.sum(weights)
    result = total / total_weight if reduction == _MEAN else total
    return result.astype(x.dtype), total_weight.astype(x.dtype)


def nll_loss_backward(
    grad: Array,
    x: Array,
    target: Array,
    weight: Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: Array,
) -> Array:
    dim = _class_dim(x)
    row = -widen(grad)
    if reduction == _MEAN:
        row = row / widen(total_weight)
    row = row * _row_weights(target, weight, ignore_index, row.dtype)
    row = jnp.where(target != ignore_index, row, 0)  # the mean over no target is nan, its derivative 0
    classes = lax.broadcasted_iota(target.dtype, x.shape, dim)
    hit = classes == jnp.expand_dims(target, dim)
    return jnp.where(hit, jnp.expand_dims(row, dim), 0).astype(x.dtype)


def cross_entropy(logits: Array, target: Array, reduction: int, ignore_index: int) -> tuple[Array, Array, Array]:
    top = jnp.max(logits, 1)
    logsumexp = top + jnp.log(jnp.sum(jnp.exp(logits - top[:, None]), 1))
    valid = target != ignore_index
    safe = jnp.where(valid, target, 0)[:, None]
    picked = jnp.take_along_axis(logits, safe, 1, mode="promise_in_bounds")[:, 0]
    # PyTorch raises for a class that is not there; a program cannot, so it gives nan, which the finiteness check sees.
    picked = jnp.where((safe[:, 0] >= 0) & (safe[:, 0] < logits.shape[1]), picked, jnp.nan)
    total = jnp.sum(jnp.where(valid, logsumexp - picked, 0))
    total_weight = jnp.sum(valid.astype(logits.dtype))
    return (total / total_weight if reduction == _MEAN else total), total_weight, logsumexp


def cross_entropy_backward(
    grad: Array,
    logits: Array,
    target: Array,
    logsumexp: Array,
    total_weight: Array,
    reduction: int,
    ignore_index: int,
) -> Array:
    row = jnp.where(target != ignore_index, grad / total_weight if reduction == _MEAN else grad, 0)[:, None]
    hit = lax.broadcasted_iota(target.dtype, logits.shape, 1) == target[:, None]
    return (jnp.exp(logits - logsumexp[:, None]) - hit.astype(logits.dtype)) * row


OPS: dict[Any, Callable[..., Any]] = {
    aten.nll_loss_forward.default: nll_loss_forward,
    aten.nll_loss_backward.default: nll_loss_backward,
    aten.nll_loss2d_forward.default: nll_loss_forward,
    aten.nll_loss2d_backward.default: nll_loss_backward,
    intrinsics.cross_entropy: cross_entropy,
    intrinsics.cross_entropy_backward: cross_entropy_backward,
}
