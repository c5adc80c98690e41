"""Logits and rotary frequencies against Hugging Face's implementations."""

import re
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.unit.models.model_sizes import SHIPPED, shipped_sizes, small_model, small_sizes
from tpu_train.models.decoder import Decoder
from tpu_train.models.rotary import RotaryEmbedding

NAMES = {
    r"embedding\.": "model.embed_tokens.",
    r"^norm\.": "model.norm.",
    r"^output\.": "lm_head.",
    r"^layers\.": "model.layers.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.feed_forward_norm\.": ".post_attention_layernorm.",
    r"\.attention\.query\.": ".self_attn.q_proj.",
    r"\.attention\.key\.": ".self_attn.k_proj.",
    r"\.attention\.value\.": ".self_attn.v_proj.",
    r"\.attention\.output\.": ".self_attn.o_proj.",
    r"\.attention\.query_norm\.": ".self_attn.q_norm.",
    r"\.attention\.key_norm\.": ".self_attn.k_norm.",
    r"\.feed_forward\.(gate|up|down)\.": r".mlp.\1_proj.",
    r"\.feed_forward\.router\.": ".mlp.gate.",
    r"\.feed_forward\.experts\.down$": ".mlp.experts.down_proj",
}
SCALED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
CASES = {
    "llama3": ("llama3", {}),
    "llama3 theta 500000": ("llama3", {"rope_theta": 500000.0}),
    "llama3 factor 8": ("llama3", {"rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, **SCALED}}),
    "llama3 factor 32, tied": (
        "llama3",
        {"rope_theta": 500000.0, "rope_scaling": {"factor": 32.0, **SCALED}, "tie_embeddings": True},
    ),
    "llama3 without grouping": ("llama3", {"num_kv_heads": 6, "head_dim": 8}),
    "qwen3": ("qwen3", {"norm_eps": 1e-6}),
    "qwen3 tied": ("qwen3", {"norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_embeddings": True}),
    "qwen3 one key head": ("qwen3", {"num_kv_heads": 1}),
    "qwen3_moe": ("qwen3_moe", {"norm_eps": 1e-6}),
    "qwen3_moe not normalized, tied": ("qwen3_moe", {"norm_topk_prob": False, "tie_embeddings": True}),
    "qwen3_moe one of eight": ("qwen3_moe", {"num_experts": 8, "top_k": 1, "norm_topk_prob": False}),
    "qwen3_moe all of three": ("qwen3_moe", {"num_experts": 3, "top_k": 3}),
}


def rope_parameters(theta: float, scaling: dict[str, float] | None) -> dict[str, float | str]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    renamed = {key.replace("max_positions", "max_position_embeddings"): value for key, value in scaling.items()}
    return {"rope_type": "llama3", "rope_theta": theta, **renamed}


def reference_sizes(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": sizes["dim"],
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"],
        "head_dim": sizes["head_dim"],
        "intermediate_size": sizes["ffn_dim"],
        "vocab_size": sizes["vocab_size"],
        "rms_norm_eps": sizes["norm_eps"],
        "tie_word_embeddings": sizes["tie_embeddings"],
        "rope_parameters": rope_parameters(sizes["rope_theta"], sizes.get("rope_scaling")),
        "max_position_embeddings": 131072,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def moe_config(sizes: dict[str, Any]) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **reference_sizes(sizes),
        moe_intermediate_size=sizes["ffn_dim"],
        num_experts=sizes["num_experts"],
        num_experts_per_tok=sizes["top_k"],
        norm_topk_prob=sizes["norm_topk_prob"],
    )


def reference_name(name: str) -> str:
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def make_reference(family: str, sizes: dict[str, Any], model: Decoder) -> PreTrainedModel:
    weights: dict[str, torch.Tensor] = {reference_name(name): w for name, w in model.named_parameters()}
    if family == "llama3":
        reference = LlamaForCausalLM(LlamaConfig(**reference_sizes(sizes)))
    elif family == "qwen3":
        reference = Qwen3ForCausalLM(Qwen3Config(**reference_sizes(sizes)))
    else:
        reference = Qwen3MoeForCausalLM(moe_config(sizes))
        for i in range(sizes["num_layers"]):
            halves = [weights.pop(f"model.layers.{i}.feed_forward.experts.{half}") for half in ("gate", "up")]
            weights[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat(halves, 1)
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) == ({"lm_head.weight"} if sizes["tie_embeddings"] else set())
    return reference.eval()


@pytest.fixture(params=list(CASES))
def pair(request):
    """Model and reference."""
    family, changes = CASES[request.param]
    model = small_model(family, **changes)
    return model, make_reference(family, small_sizes(family, **changes), model)


def logits_of(pair, attention: str, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model, reference = pair
    reference.set_attn_implementation(attention)
    with torch.no_grad():
        expected = reference(tokens, position_ids=positions, use_cache=False).logits
        actual = model(tokens, positions)
    assert expected.std() > 0.5  # so that 1e-5 absolute is 1e-5 of a logit
    return actual, expected


@pytest.mark.parametrize("start", [0, 8000, 16352])
def test_logits_equal_transformers_at_any_position(pair, start):
    tokens = torch.randint(97, (2, 32), generator=torch.Generator().manual_seed(1))
    actual, expected = logits_of(pair, "eager", tokens, start + torch.arange(32).expand(2, 32))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_logits_equal_transformers_over_a_long_sequence(pair):
    """With the same attention op, where all operations are the same; fp32 sums of 2048 differ by 1e-5 otherwise."""
    tokens = torch.randint(97, (1, 2048), generator=torch.Generator().manual_seed(2))
    actual, expected = logits_of(pair, "sdpa", tokens, torch.arange(2048)[None])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pair", [case for case, (family, _) in CASES.items() if "moe" not in family], indirect=True)
def test_bfloat16_logits_equal_transformers(pair):
    """Dense families only: transformers' router multiplies in bfloat16 and may choose others than this, in float32."""
    for module in pair:  # parameters only: .bfloat16() would round the reference's frequencies too
        for weight in module.parameters():
            weight.data = weight.data.bfloat16()
    tokens, positions = torch.arange(64)[None], 3000 + torch.arange(64)[None]
    actual, expected = logits_of(pair, "sdpa", tokens, positions)
    assert actual.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_frequencies_equal_transformers_bit_for_bit(name):
    sizes = shipped_sizes(name)
    expected = LlamaRotaryEmbedding(LlamaConfig(**reference_sizes(sizes))).inv_freq
    with torch.device("meta"):
        rotary = RotaryEmbedding(sizes["head_dim"], sizes["rope_theta"], sizes.get("rope_scaling"))
    assert torch.equal(torch.tensor(rotary.frequencies), expected)
