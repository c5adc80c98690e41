"""The initial weights as a captured program, each parameter's draws keyed by its full name."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.stateless import _reparametrize_module

from tpu_train.graph import random_sites
from tpu_train.graph.capture import CapturedProgram, TensorSpec, capture


def capture_initialization(
    model: nn.Module, dtype: torch.dtype, stored: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> CapturedProgram:
    """A program without inputs that returns every parameter of the model by full name.

    Modules fill their own parameters in `reset_parameters()`, PyTorch's convention, children before parents so that a
    parent has the last word. The values depend on the run's seed and the parameters' names only.

    Args:
        model: on any device, meta included.
        dtype: of the weights; draws are made in float32 and rounded.
        stored: shapes that parameters are padded to, with zeros; those that are not here stay as they are.

    Raises:
        ValueError: a parameter that no `reset_parameters` fills.
    """
    specs = {name: TensorSpec(tuple(p.shape), dtype) for name, p in model.named_parameters()}

    def initialize() -> Mapping[str, Tensor]:
        blank = {name: torch.empty(spec.shape, dtype=torch.float32) for name, spec in specs.items()}
        untouched = {name: tensor._version for name, tensor in blank.items()}
        with random_sites.sites_by_name(blank), _reparametrize_module(model, blank, tie_weights=True):
            for module in _children_first(model):
                _reset(module)
        missed = [name for name, tensor in blank.items() if tensor._version == untouched[name]]
        if missed:
            raise ValueError(
                f"no reset_parameters() fills {', '.join(missed)}; give the module that owns it one, as torch.nn's have"
            )
        return {name: _pad(tensor.to(dtype), stored.get(name, tensor.shape)) for name, tensor in blank.items()}

    return capture("initialize", initialize, {})


def _pad(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with zeros behind it in each dimension, up to a shape."""
    missing = [stored - size for size, stored in zip(tensor.shape, shape, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [amount for after in reversed(missing) for amount in (0, after)])


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _reset(module: nn.Module) -> None:
    # nn.MultiheadAttention and nn.Transformer spell it with an underscore.
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(module, name, None)
        if callable(reset):
            reset()
            return
