"""Tensor parallelism: what the modules named by a plan do with their activations.

Key idea: a rule wraps a module's forward for the time of a trace. Inside a region every device computes on its own part
of heads, hidden units or vocabulary; between regions on its own part of the sequence. So each replicated parameter sees
a part of the work on each device, and its gradients are summed over `tensor` whatever it is.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tpu_train.sharding.collectives import axis_index, draws_forbidden, gather, scatter_sum
from tpu_train.sharding.layout import HeadSelection
from tpu_train.sharding.mesh import MeshShape
from tpu_train.sharding.plan import ModuleRule

_AXIS = "tensor"
_SEQUENCE_DIM = 1

Forward = Callable[..., Any]


@contextlib.contextmanager
def wrapped_forwards(model: nn.Module, wrappers: Mapping[str, Callable[[nn.Module, str], Forward]]) -> Iterator[None]:
    """Inside, the modules at these paths have other forwards."""
    modules = dict(model.named_modules())
    try:
        for path, wrap in wrappers.items():
            modules[path].forward = wrap(modules[path], path)
        yield
    finally:
        for path in wrappers:
            modules[path].__dict__.pop("forward", None)


def _gather_input(module: nn.Module, path: str, mesh: MeshShape) -> Forward:
    forward = module.forward

    def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = gather(x, _AXIS, mesh.tensor, _SEQUENCE_DIM, path)
        with draws_forbidden(path):
            return forward(whole, *args, **kwargs)

    return wrapped


def _gather_output(module: nn.Module, path: str, mesh: MeshShape) -> Forward:
    forward = module.forward
    return lambda *args, **kwargs: gather(forward(*args, **kwargs), _AXIS, mesh.tensor, _SEQUENCE_DIM, path)


def _scatter_output(module: nn.Module, path: str, mesh: MeshShape) -> Forward:
    if getattr(module, "bias", None) is not None:
        raise ValueError(f"sharding plan: {path} has a bias, which each device would add; split it by columns instead")
    forward = module.forward
    return lambda *args, **kwargs: _scatter(forward(*args, **kwargs), path, mesh)


def _scatter(partial: Tensor, path: str, mesh: MeshShape) -> Tensor:
    length = partial.shape[_SEQUENCE_DIM]
    if length % mesh.tensor:
        raise ValueError(f"{path}: a sequence of {length} tokens cannot be split over tensor={mesh.tensor}")
    return scatter_sum(partial, _AXIS, mesh.tensor, _SEQUENCE_DIM, path)


def _vocabulary(module: nn.Module, path: str, mesh: MeshShape) -> Forward:
    forward = module.forward

    def wrapped(tokens: Tensor) -> Tensor:
        weight = module.weight
        assert isinstance(weight, Tensor)
        local, here = local_ids(tokens, weight.shape[0])
        return _scatter(forward(local) * here.unsqueeze(-1).to(weight.dtype), path, mesh)

    return wrapped


WRAPPERS: Mapping[ModuleRule, Callable[[nn.Module, str, MeshShape], Forward]] = {
    "gather_input": _gather_input,
    "gather_output": _gather_output,
    "scatter_output": _scatter_output,
    "vocabulary": _vocabulary,
}


def local_ids(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Ids counted from this device's first row (0 for those of other devices), and which are this device's."""
    local = ids - axis_index(_AXIS).to(ids.dtype) * num_rows
    here = (local >= 0) & (local < num_rows)
    return torch.where(here, local, 0), here


def select_heads(weight: Tensor, selection: HeadSelection, mesh: MeshShape) -> Tensor:
    """The rows of the heads that this device's query heads need, of a projection [heads * head_dim, ...]."""
    per_device = selection.query_heads // mesh.tensor
    step = per_device if selection.count == 1 else 1
    queries = axis_index(_AXIS).to(torch.int64) * per_device + torch.arange(0, selection.count * step, step)
    heads = queries * selection.num_heads // selection.query_heads
    return weight.unflatten(0, (selection.num_heads, -1)).index_select(0, heads).flatten(0, 1)


def own_rows(size: int, local_size: int, axes: tuple[str, ...], mesh: MeshShape) -> Tensor:
    """Which of this device's rows of a padded dimension exist in the parameter, bool [local_size].

    Args:
        size: of the parameter's dimension.
        local_size: of the device's part.
        axes: that the dimension is split over, outermost first.
        mesh: its shape.
    """
    position = torch.zeros((), dtype=torch.int32)
    for axis in axes:
        position = position * mesh.size_of((axis,)) + axis_index(axis)
    return position * local_size + torch.arange(local_size, dtype=torch.int32) < size
