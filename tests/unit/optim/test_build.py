"""Configurations become optimizers, and weight decay reaches the right parameters."""

import pytest
import torch
from torch import nn

from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.config.rules import DECAY_KINDS
from tpu_train.optim.adamw import AdamW
from tpu_train.optim.build import build_optimizer, decay_mask
from tpu_train.optim.sgd import Sgd
from tpu_train.training.build import build_model


class RMSNorm(nn.Module):
    """A norm that is no torch class; its weight is two-dimensional, as one per head is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 4))


class PreNormBlock(nn.ModuleDict):
    """Named after a norm, and owner of no parameter itself."""


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embedding = nn.Embedding(10, 4)
        self.layers = nn.ModuleList([PreNormBlock({"norm": RMSNorm(), "proj": nn.Linear(4, 4)})])
        self.final = nn.LayerNorm(4)
        self.output = nn.Linear(4, 10, bias=False)
        if tied:
            self.output.weight = self.embedding.weight


NAMES = {
    "scale",
    "embedding.weight",
    "layers.0.norm.weight",
    "layers.0.proj.weight",
    "layers.0.proj.bias",
    "final.weight",
    "final.bias",
    "output.weight",
}


def decayed(tied: bool, *kinds: str) -> set[str]:
    mask = decay_mask(Model(tied), kinds)
    assert set(mask) == NAMES
    return {name for name, value in mask.items() if value}


def test_decay_skips_the_kinds_that_are_named() -> None:
    assert decayed(False) == NAMES
    assert decayed(False, "norm") == NAMES - {"layers.0.norm.weight", "final.weight", "final.bias"}
    assert decayed(False, "bias") == NAMES - {"layers.0.proj.bias", "final.bias"}
    assert decayed(False, "embedding") == NAMES - {"embedding.weight"}
    assert decayed(False, *DECAY_KINDS) == {"scale", "layers.0.proj.weight", "output.weight"}


def test_a_tied_output_projection_is_an_embedding() -> None:
    assert decayed(True, *DECAY_KINDS) == {"scale", "layers.0.proj.weight"}
    assert decayed(True, "norm", "bias") >= {"embedding.weight", "output.weight"}


def test_configurations_become_optimizers() -> None:
    adamw = schema.AdamW(name="adamw", lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, no_decay=())
    sgd = schema.Sgd(name="sgd", lr=1e-3, momentum=0.9, weight_decay=0.2, no_decay=())
    assert build_optimizer(adamw) == AdamW(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    assert build_optimizer(sgd) == Sgd(momentum=0.9, weight_decay=0.2)


@pytest.mark.parametrize("choice", ["qwen3_debug", "llama3_debug"])
def test_the_shipped_models_decay_their_matrices_only(choice: str) -> None:
    """Written out: of a layer, what multiplies; tied or not, never the embedding."""
    mask = decay_mask(build_model(compose([f"model={choice}"]).run.model), DECAY_KINDS)
    matrices = {"query", "key", "value", "output", "gate", "up", "down"}
    assert {name for name, decays in mask.items() if decays} == {n for n in mask if n.split(".")[-2] in matrices}
    assert not mask["embedding.weight"]
    assert not mask["layers.0.attention_norm.weight"]
