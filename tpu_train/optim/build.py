"""From configuration to optimizer, and which parameters are subject to weight decay.

Key idea: the kind of a parameter follows from the modules that own it, and a parameter that two modules share has the
kinds of both: an output projection tied to the embedding is an embedding.
"""

from collections.abc import Collection

from torch import nn

from tpu_train.config import schema
from tpu_train.config.rules import DECAY_KINDS
from tpu_train.models.linear import Embedding
from tpu_train.optim.adamw import AdamW
from tpu_train.optim.optimizer import Optimizer
from tpu_train.optim.sgd import Sgd


def build_optimizer(config: schema.AdamW | schema.Sgd) -> Optimizer:
    """The optimizer of a configuration. Its rate comes from `schedules.schedule`."""
    match config:
        case schema.AdamW():
            return AdamW(config.beta1, config.beta2, config.eps, config.weight_decay)
        case schema.Sgd():
            return Sgd(config.momentum, config.weight_decay)


def decay_mask(model: nn.Module, no_decay: Collection[str]) -> dict[str, bool]:
    """Whether each parameter is subject to weight decay, by its full name.

    Args:
        model: any module, on any device.
        no_decay: kinds that are not, any of `DECAY_KINDS`. "norm": owned by a module whose class name contains "Norm";
            "bias": named `bias`; "embedding": owned by an embedding table.

    Returns:
        One entry for each name; a shared parameter has one under each of its names, all equal.
    """
    assert set(no_decay) <= set(DECAY_KINDS), no_decay
    names: dict[str, nn.Parameter] = {}
    excluded: set[nn.Parameter] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            names[f"{path}.{name}" if path else name] = param
            if not _kinds(module, name).isdisjoint(no_decay):
                excluded.add(param)
    return {name: param not in excluded for name, param in names.items()}


def _kinds(owner: nn.Module, name: str) -> set[str]:
    kinds = {
        "norm": "Norm" in type(owner).__name__,
        "bias": name == "bias",
        "embedding": isinstance(owner, Embedding | nn.Embedding),
    }
    return {kind for kind in DECAY_KINDS if kinds[kind]}
