"""From a configured model to its config tree, and from chosen kernels to swaps of its components."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tpu_train.config.schema import DecoderModel
from tpu_train.kernels.choose import Chosen, Kernel
from tpu_train.kernels.swap import Swap, load
from tpu_train.models.attention import ScaledDotProductAttention
from tpu_train.models.families import FAMILIES
from tpu_train.models.moe import GroupedProduct
from tpu_train.models.node import Node


def model_tree(config: DecoderModel) -> Node:
    """The config tree of a configured model, before any swap."""
    sizes = dataclasses.asdict(config)
    family = sizes.pop("family")
    del sizes["seq_len"]  # a default of training.seq_len, no property of the model
    return FAMILIES[family](**sizes)


def swaps(chosen: Chosen) -> list[Swap]:
    """The swaps that put the chosen kernels into a model; the loss is the objective's."""
    return [*_attention(chosen.attention), *_moe(chosen.moe)]


def loss_kernel(chosen: Chosen) -> Callable[..., Any] | None:
    """The op that gives a row's log-sum-exp and label's logit without the logits; None for the reference."""
    if chosen.loss.name == "reference":
        return None
    from tpu_train.kernels.ops import LOSS

    return LOSS[chosen.loss.name]


def _attention(kernel: Kernel) -> Iterator[Swap]:
    if kernel.name == "custom":
        yield _custom("kernels.attention=custom", ScaledDotProductAttention, kernel)
    elif kernel.name != "reference":
        from tpu_train.kernels.modules import KernelAttention

        options = {"kernel": kernel.name, **kernel.options}
        yield Swap(f"kernels.attention={kernel.name}", ScaledDotProductAttention, KernelAttention, options=options)


def _moe(kernel: Kernel) -> Iterator[Swap]:
    if kernel.name == "custom":
        yield _custom("kernels.moe=custom", GroupedProduct, kernel)
    elif kernel.name != "reference":
        from tpu_train.kernels.modules import KernelProduct

        options = {"kernel": kernel.name, **kernel.options}
        yield Swap(f"kernels.moe={kernel.name}", GroupedProduct, KernelProduct, options=options)


def _custom(name: str, replaces: type, kernel: Kernel) -> Swap:
    assert kernel.component is not None
    return Swap(name, replaces, load(kernel.component), kernel.paths, kernel.options)
