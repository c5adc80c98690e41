"""From configuration to the parts of a run. Only builders know the config; what they build takes plain arguments."""

import dataclasses

import torch
from torch import nn

from tpu_train.config import schema
from tpu_train.models.families import FAMILIES
from tpu_train.objectives.base import Objective
from tpu_train.objectives.causal_lm import CausalLm, CrossEntropy, summed_cross_entropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(config: schema.Llama3Model | schema.Qwen3Model, device: str = "meta") -> nn.Module:
    """The model; on the meta device it has shapes and names and no storage."""
    sizes = dataclasses.asdict(config)
    family = sizes.pop("family")
    del sizes["seq_len"]  # a default of training.seq_len, no property of the model
    with torch.device(device):
        return FAMILIES[family](**sizes).build()


def build_objective(config: schema.CausalLmObjective, cross_entropy: CrossEntropy = summed_cross_entropy) -> Objective:
    """The objective of a configuration, with the cross-entropy that fits where the logits lie."""
    return {"causal_lm": CausalLm}[config.name](cross_entropy)
