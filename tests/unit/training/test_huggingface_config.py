"""`config.json` in and out: against the shipped models, and against what transformers reads in the same file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.unit.models.model_sizes import SHIPPED, shipped_sizes
from tpu_train.config import schema
from tpu_train.config.convert import convert
from tpu_train.training.huggingface_config import Model, config_json, read_config

# As published with the weights, keys about generation left out.
LLAMA3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
LLAMA3_1B = {
    **LLAMA3_8B,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA3_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
QWEN3_0_6B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_8B = {
    **QWEN3_0_6B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "tie_word_embeddings": False,
}
QWEN3_30B = {
    **QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN3_235B = {
    **QWEN3_30B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
PUBLISHED = {"llama3_8b": LLAMA3_8B, "llama3_1b": LLAMA3_1B, "qwen3_0_6b": QWEN3_0_6B, "qwen3_8b": QWEN3_8B}
PUBLISHED |= {"qwen3_30b": QWEN3_30B, "qwen3_235b": QWEN3_235B}
NEW_ROPE = {"rope_type": "llama3", "rope_theta": 250000.0, "factor": 4.0, "low_freq_factor": 1.0}
NEW_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 4096}


def shipped_model(name: str) -> Model:
    sizes = shipped_sizes(name)
    model, problems = convert(schema.Llama3Model | schema.Qwen3Model | schema.Qwen3MoeModel, sizes)
    assert not problems
    return model


def write(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    """A config.json with keys changed; `...` removes one."""
    content = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_configurations_are_the_shipped_models(tmp_path: Path, name: str) -> None:
    config = read_config(write(tmp_path, PUBLISHED[name]))
    assert config.model == shipped_model(name)
    assert config.dtype == "bfloat16"
    assert config.max_positions == PUBLISHED[name]["max_position_embeddings"]


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA3_8B, {"rope_scaling": {**LLAMA3_8B["rope_scaling"], "type": "llama3", "rope_type": ...}}),
        (LLAMA3_8B, {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": NEW_ROPE}),
        (LLAMA3_8B, {"rope_scaling": ..., "rope_parameters": {**NEW_ROPE, "rope_theta": ...}}),
        (LLAMA3_8B, {"rope_scaling": ..., "rope_theta": ...}),
        (LLAMA3_8B, {"rope_scaling": {"rope_type": "default"}}),
        (LLAMA3_8B, {"rope_scaling": {**NEW_ROPE, "original_max_position_embeddings": ...}}),
        (LLAMA3_8B, {"num_key_value_heads": ..., "rms_norm_eps": ..., "tie_word_embeddings": ...}),
        (LLAMA3_8B, {"head_dim": None, "num_key_value_heads": None, "max_position_embeddings": ...}),
        (LLAMA3_8B, {"head_dim": 96, "use_sliding_window": True}),
        (QWEN3_8B, {"head_dim": ..., "tie_word_embeddings": ..., "rms_norm_eps": ..., "rope_theta": ...}),
        (QWEN3_8B, {"num_key_value_heads": ..., "max_position_embeddings": ...}),
        (QWEN3_8B, {"num_key_value_heads": None}),
        (QWEN3_8B, {"rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 36}),
        (QWEN3_8B, {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        (QWEN3_8B, {"layer_types": ["full_attention"] * 36, "torch_dtype": ..., "dtype": "float16"}),
    ],
)
def test_keys_old_new_and_left_out_are_read_as_transformers_does(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any]
) -> None:
    changes = {
        key: {k: v for k, v in value.items() if v is not ...} if isinstance(value, dict) else value
        for key, value in changes.items()
    }
    found = read_config(write(tmp_path, config, **changes))
    model, theirs = found.model, AutoConfig.from_pretrained(tmp_path)
    assert (model.dim, model.num_layers, model.ffn_dim) == (4096, theirs.num_hidden_layers, theirs.intermediate_size)
    assert (model.num_heads, model.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (model.head_dim, model.vocab_size) == (theirs.head_dim, theirs.vocab_size)
    assert (model.norm_eps, model.tie_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert found.max_positions == theirs.max_position_embeddings
    assert model.seq_len == min(found.max_positions, 8192 if model.family == "llama3" else 4096)
    assert found.dtype == {"torch.bfloat16": "bfloat16", "torch.float16": "float32"}[str(theirs.dtype)]
    rope = dict(theirs.rope_parameters)
    assert model.rope_theta == rope["rope_theta"]
    scaling = model.rope_scaling if isinstance(model, schema.Llama3Model) else None
    assert (scaling is not None) == (rope["rope_type"] == "llama3")
    if scaling:
        assert (scaling.factor, scaling.low_freq_factor) == (rope["factor"], rope["low_freq_factor"])
        assert scaling.high_freq_factor == rope["high_freq_factor"]
        assert scaling.original_max_positions == rope["original_max_position_embeddings"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict.fromkeys(["moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob"], ...),
        {"num_experts": ..., "num_local_experts": 64},
        {"head_dim": ..., "num_key_value_heads": ..., "decoder_sparse_step": ..., "mlp_only_layers": None},
        {"norm_topk_prob": False, "num_experts_per_tok": 4},
    ],
)
def test_keys_of_experts_are_read_as_transformers_does(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = read_config(write(tmp_path, QWEN3_30B, **changes)).model
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(model, schema.Qwen3MoeModel)
    assert (model.num_experts, model.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert (model.ffn_dim, model.norm_topk_prob) == (theirs.moe_intermediate_size, theirs.norm_topk_prob)
    assert model.num_kv_heads == theirs.num_key_value_heads
    assert model.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert model.router_aux_loss_coef == 0


@pytest.mark.parametrize(
    ("eos", "ids"), [(None, ()), (7, (7,)), ([128001, 128008], (128001, 128008)), (..., ()), ([], ())]
)
def test_tokens_that_end_a_text_are_none_one_or_a_list(tmp_path: Path, eos: Any, ids: tuple[int, ...]) -> None:
    assert read_config(write(tmp_path, LLAMA3_8B, eos_token_id=eos)).eos_ids == ids


def test_dtype_that_is_not_said_is_none(tmp_path: Path) -> None:
    assert read_config(write(tmp_path, LLAMA3_8B, torch_dtype=...)).dtype is None


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            LLAMA3_8B,
            {"model_type": "mistral"},
            "model_type is 'mistral', expected llama or qwen3 or qwen3_moe (LlamaFor",
        ),
        (LLAMA3_8B, {"model_type": ...}, "model_type is null, expected llama or qwen3 or qwen3_moe"),
        (
            QWEN3_8B,
            {"model_type": "qwen3_moe"},
            "architectures is ['Qwen3ForCausalLM'], expected ['Qwen3MoeForCausalLM']",
        ),
        (QWEN3_30B, {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1: every layer has experts"),
        (QWEN3_30B, {"mlp_only_layers": [0]}, "mlp_only_layers is [0], expected []: every layer has experts"),
        (QWEN3_30B, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129, more than num_experts, 128"),
        (QWEN3_30B, {"num_experts": 0}, "num_experts is 0, expected a number of at least 1"),
        (QWEN3_30B, {"moe_intermediate_size": "big"}, "moe_intermediate_size is 'big', expected an integer"),
        (
            QWEN3_30B,
            {"use_sliding_window": True, "sliding_window": 1024},
            "sliding_window is 1024, expected use_sliding_window=false",
        ),
        (
            LLAMA3_8B,
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures is ['LlamaForSequenceClassification'], expected ['LlamaForCausalLM']",
        ),
        (LLAMA3_8B, {"attention_bias": True}, "attention_bias is true, expected false: projections have no bias"),
        (LLAMA3_8B, {"mlp_bias": True}, "mlp_bias is true, expected false"),
        (LLAMA3_8B, {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        (LLAMA3_8B, {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, expected null"),
        (LLAMA3_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, expected 1"),
        (LLAMA3_8B, {"rope_scaling": {"type": "linear"}}, "rope_scaling.rope_type is 'linear', expected default or"),
        (
            LLAMA3_8B,
            {"rope_scaling": ..., "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type is 'yarn', expected default or llama3",
        ),
        (QWEN3_8B, {"rope_scaling": NEW_ROPE}, "rope_scaling.rope_type is 'llama3', expected default"),
        (LLAMA3_8B, {"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object or null"),
        (LLAMA3_8B, {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.factor is missing, expected a number"),
        (
            LLAMA3_8B,
            {"rope_scaling": {**NEW_ROPE, "factor": 0.5}},
            "rope_scaling.factor is 0.5, expected a number of at least 1",
        ),
        (
            LLAMA3_8B,
            {"rope_scaling": {**NEW_ROPE, "rope_theta": -1.0}},
            "rope_scaling.rope_theta is -1.0, expected a number greater than 1",
        ),
        (
            QWEN3_8B,
            {"rope_scaling": ..., "rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
            "rope_parameters.full_attention is {'rope_theta': 5.0}, expected none but factor,",
        ),
        (
            QWEN3_8B,
            {"rope_scaling": ..., "rope_parameters": {"partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor is 0.25, expected 1",
        ),
        (
            QWEN3_8B,
            {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 12},
            "sliding_window is 1024 from layer 12 on, expected use_sliding_window=false",
        ),
        (
            QWEN3_8B,
            {"layer_types": ["full_attention"] * 35 + ["sliding_attention"]},
            "expected 'full_attention' for each of 36 layers",
        ),
        (LLAMA3_8B, {"hidden_size": ...}, "hidden_size is missing, expected an integer"),
        (LLAMA3_8B, {"hidden_size": "big"}, "hidden_size is 'big', expected an integer"),
        (LLAMA3_8B, {"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a number of at least 1"),
        (LLAMA3_8B, {"num_attention_heads": 31}, "head_dim is missing, expected an integer"),
        (LLAMA3_8B, {"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide num_attention_heads"),
        (QWEN3_8B, {"head_dim": 63}, "head_dim is 63; rotary embeddings need an even number"),
        (LLAMA3_8B, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        (LLAMA3_8B, {"max_position_embeddings": -5}, "max_position_embeddings is -5, expected a number of at least 1"),
        (LLAMA3_8B, {"torch_dtype": "int8"}, "dtype is 'int8', expected one of float32, bfloat16, float16"),
        (LLAMA3_8B, {"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected an integer, a list of them, or null"),
    ],
)
def test_what_is_not_computed_here_is_refused_with_file_and_key(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, config, **changes)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{re.escape(message)}"):
        read_config(path)


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, LLAMA3_8B, mlp_bias=True, vocab_size=None, rope_scaling={"type": "yarn"}, eos_token_id="x")
    with pytest.raises(ValueError, match="mlp_bias") as refused:
        read_config(path)
    lines = str(refused.value).splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in lines] == [
        "vocab_size",
        "mlp_bias",
        "rope_scaling.rope_type",
        "eos_token_id",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": "llama"', "not JSON: .*; download it again"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[1, 2]", r"holds \[1, 2\], expected a JSON object"),
    ],
)
def test_file_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: {message}"):
        read_config(path)


def test_values_of_any_type_are_read_or_refused_and_never_crash(tmp_path: Path) -> None:
    values = (None, -1, 5, 1.5, True, "x", [], [1], ["x", []], {}, {"a": 1}, float("nan"))
    for config in (LLAMA3_8B, QWEN3_30B, {**QWEN3_8B, "use_sliding_window": True, "layer_types": None}):
        for key in config:
            for value in values:
                path = write(tmp_path, config, **{key: value})
                try:
                    read_config(path)
                except ValueError as error:
                    assert str(path) in str(error)  # noqa: PT017 - whether it raises is not the point


@pytest.mark.parametrize("name", SHIPPED)
def test_written_configuration_is_that_of_the_model_for_transformers_and_for_reading(tmp_path: Path, name: str) -> None:
    model = shipped_model(name)
    path = write(tmp_path, config_json(model, "bfloat16", (3, 4), 131072))
    config = read_config(path)
    assert (config.dtype, config.eos_ids, config.max_positions) == ("bfloat16", (3, 4), 131072)
    assert config_json(config.model, "bfloat16", (3, 4), 131072) == json.loads(path.read_text())
    assert config.model == model or name.endswith("debug")  # whose seq_len is shorter
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.eos_token_id == [3, 4]
    assert theirs.bos_token_id is None
    assert theirs.rope_parameters["rope_theta"] == model.rope_theta
    scaled = isinstance(model, schema.Llama3Model) and model.rope_scaling is not None
    assert theirs.rope_parameters["rope_type"] == ("llama3" if scaled else "default")
