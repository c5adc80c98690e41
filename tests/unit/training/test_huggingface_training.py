"""A model of transformers', imported, trained, exported, against the same steps with transformers and torch.optim."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.unit.runs import ADAMW, INIT_STD, make_run, random_batches
from tpu_train.execution.runtime import Runtime
from tpu_train.sharding.plan import NO_PLAN
from tpu_train.training.engine import Engine
from tpu_train.training.huggingface import read_folder, write_folder
from tpu_train.training.weights import WeightSource

STEPS = 5
MAX_GRAD_NORM = 0.3
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "initializer_range": INIT_STD,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 16}


def make_reference(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama3":
        return LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=ROPE))
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts))
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True))


def train_reference(
    model: PreTrainedModel, batches: Sequence[dict[str, np.ndarray]]
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms; the embedding and the norms do not decay."""
    named = dict(model.named_parameters())
    kept = {name for name in named if "norm" in name or "embed" in name}
    groups = [
        {"params": [named[name] for name in named if name not in kept], "weight_decay": ADAMW.weight_decay},
        {"params": [named[name] for name in kept], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps)
    losses, norms = [], []
    for batch in batches:
        tokens, labels = (torch.from_numpy(batch[key]).long() for key in ("tokens", "labels"))
        loss = F.cross_entropy(model(tokens, use_cache=False).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(list(named.values()), MAX_GRAD_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3_moe"])
def test_imported_trained_and_exported_equals_the_same_in_transformers(tmp_path: Path, family: str) -> None:
    reference = make_reference(family)
    reference.save_pretrained(tmp_path / "in")
    folder = read_folder(tmp_path / "in")
    run = make_run(model=folder.model, training={"max_grad_norm": MAX_GRAD_NORM})
    batches = random_batches(STEPS, run, ignored=True)
    runtime = Runtime("cpu")
    engine = Engine(run, runtime, plan=NO_PLAN)  # on one device
    state = engine.state_from(runtime.put({name: folder.source.load(name) for name in folder.source.specs}))
    losses, norms = [], []
    for batch in batches:
        state, metrics = engine.step(state, batch, ADAMW.lr)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    trained = runtime.fetch(state["params"])
    source = WeightSource("trained", folder.source.specs, lambda name: trained[name])
    write_folder(tmp_path / "out", folder.model, source, eos_ids=folder.eos_ids)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())

    initial = {name: parameter.detach().clone() for name, parameter in reference.named_parameters()}
    expected_losses, expected_norms = train_reference(reference.train(), batches)
    assert max(expected_norms) > MAX_GRAD_NORM, "clipping must be active"
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
    assert exported.keys() == initial.keys()
    for name, parameter in reference.named_parameters():
        difference = exported[name] - parameter
        assert (parameter - initial[name]).norm() > 1e-3 * parameter.norm(), "training must change it"
        assert difference.norm() / parameter.norm() <= 1e-5, name
        assert difference.abs().max() <= 1e-4, name
