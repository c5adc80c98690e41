"""From configuration to the parts of a run. Only builders know the config; what they build takes plain arguments."""

from collections.abc import Sequence

import torch
from torch import nn

from tpu_train.config import schema
from tpu_train.kernels.build import model_tree
from tpu_train.kernels.swap import Swap, rewrite
from tpu_train.objectives.base import Objective
from tpu_train.objectives.causal_lm import CausalLm, CrossEntropy, LinearCrossEntropy, summed_cross_entropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(config: schema.DecoderModel, device: str = "meta", swaps: Sequence[Swap] = ()) -> nn.Module:
    """The model with some of its components swapped; on the meta device it has shapes and names and no storage.

    Raises:
        ValueError: a swap matches nothing, or two match one component.
    """
    with torch.device(device):
        return rewrite(model_tree(config), swaps).build()


def build_objective(
    config: schema.CausalLmObjective,
    cross_entropy: CrossEntropy = summed_cross_entropy,
    linear_cross_entropy: LinearCrossEntropy | None = None,
) -> Objective:
    """The objective of a configuration, with the cross-entropy that fits where the logits lie, or that needs none."""
    return {"causal_lm": CausalLm}[config.name](cross_entropy, linear_cross_entropy)
