"""A Hugging Face `config.json` as the schema's model, and back.

Key idea: what the file says is translated to the schema's keys and judged by the schema's own rules; what it leaves out
is what `transformers` takes then; what would compute something else than the model here is refused.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tpu_train.config import schema
from tpu_train.config.convert import convert, show

Model = schema.Llama3Model | schema.Qwen3Model | schema.Qwen3MoeModel


@dataclasses.dataclass(frozen=True)
class _Family:
    """What Hugging Face calls a family, and what its configurations leave out.

    Attributes:
        section: the schema's section.
        architecture: the class in `transformers`.
        seq_len: most tokens that `seq_len` is set to, as in the shipped models; the model may reach much farther.
        defaults: what `transformers` takes for a key that is not there.
        keys: names of the schema's keys that the families do not share.
    """

    section: type[Model]
    architecture: str
    seq_len: int
    defaults: Mapping[str, Any]
    keys: Mapping[str, str]


_DENSE_KEYS = {"ffn_dim": "intermediate_size"}
_MOE_KEYS = {
    "ffn_dim": "moe_intermediate_size",
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "norm_topk_prob": "norm_topk_prob",
}
_MOE_DEFAULTS = {
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "num_key_value_heads": 4,
}
_SHARED_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
FAMILIES = {
    "llama": _Family(
        schema.Llama3Model,
        "LlamaForCausalLM",
        8192,
        {**_SHARED_DEFAULTS, "max_position_embeddings": 2048},
        _DENSE_KEYS,
    ),
    "qwen3": _Family(
        schema.Qwen3Model,
        "Qwen3ForCausalLM",
        4096,
        {**_SHARED_DEFAULTS, "max_position_embeddings": 32768, "head_dim": 128, "num_key_value_heads": 32},
        _DENSE_KEYS,
    ),
    "qwen3_moe": _Family(
        schema.Qwen3MoeModel,
        "Qwen3MoeForCausalLM",
        4096,
        {**_SHARED_DEFAULTS, **_MOE_DEFAULTS, "max_position_embeddings": 32768},
        _MOE_KEYS,
    ),
}

_KEYS = {
    "dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_ROPE_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_positions": "original_max_position_embeddings",
}
# The value that a key must have where it is there, and why.
_REQUIRED = {
    "hidden_act": ("silu", "the feed-forward layers are gated by silu"),
    "attention_bias": (False, "projections have no bias"),
    "mlp_bias": (False, "projections have no bias"),
    "partial_rotary_factor": (1, "all of a head is rotated"),
    "quantization_config": (None, "weights are float32, bfloat16 or float16"),
    "decoder_sparse_step": (1, "every layer has experts"),
    "mlp_only_layers": ([], "every layer has experts"),
}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}


@dataclasses.dataclass(frozen=True)
class HuggingFaceConfig:
    """What a `config.json` says.

    Attributes:
        model: the model; `init_std`, `dropout` and `router_aux_loss_coef` are the schema's defaults: they are about
            training, and files have them without meaning them.
        dtype: float32 or bfloat16, for float16 the former; None where the file does not say.
        eos_ids: tokens that end a text, most important first.
        max_positions: most tokens that the model is meant for.
    """

    model: Model
    dtype: str | None
    eos_ids: tuple[int, ...]
    max_positions: int


def read_config(path: Path) -> HuggingFaceConfig:
    """Reads a `config.json`.

    Raises:
        ValueError: it is missing, unreadable, or of a model that is not computed here; all reasons, one a line.
    """
    config = read_json(path)
    family = _family(config, path)
    if "num_local_experts" in config:  # transformers 5 writes it so
        config = {"num_experts": config["num_local_experts"], **config}
    config = {**family.defaults, **config}
    rope_key, found_rope = _rope(config)
    rope = found_rope if isinstance(found_rope, dict) else {}
    values, names = _sizes(config, family), {**_KEYS, **family.keys, "seq_len": "max_position_embeddings"}
    names |= {"rope_theta": f"{rope_key}.rope_theta" if "rope_theta" in rope else "rope_theta"}
    values |= {"rope_theta": rope.get("rope_theta", config["rope_theta"])}
    if family.section is schema.Llama3Model:
        values["rope_scaling"] = _scaling(rope, config)
        names |= {f"rope_scaling.{ours}": f"{rope_key}.{theirs}" for ours, theirs in _ROPE_KEYS.items()}
    model, refused = convert(family.section, values)
    problems = [p.message.replace(p.keys[0], names[p.keys[0]], 1) for p in refused]
    problems += [*_differences(config), *_rope_problems(rope_key, found_rope, family)]
    if not refused:
        problems += _misfits(model, config)
    dtype, eos_ids = config.get("dtype") or config.get("torch_dtype"), _ids(config.get("eos_token_id"))
    if dtype is not None and str(dtype).removeprefix("torch.") not in _DTYPES:
        problems.append(f"dtype is {show(dtype)}, expected one of {', '.join(_DTYPES)}")
    if eos_ids is None:
        problems.append(f"eos_token_id is {show(config['eos_token_id'])}, expected an integer, a list of them, or null")
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    assert eos_ids is not None
    dtype = None if dtype is None else _DTYPES[str(dtype).removeprefix("torch.")]
    return HuggingFaceConfig(model, dtype, eos_ids, int(config["max_position_embeddings"]))


def config_json(model: Model, dtype: str, eos_ids: tuple[int, ...], max_positions: int) -> dict[str, Any]:
    """The content of a `config.json`, in the keys that every `transformers` since 4.43 reads."""
    model_type = next(name for name, family in FAMILIES.items() if isinstance(model, family.section))
    scaling = model.rope_scaling if isinstance(model, schema.Llama3Model) else None
    config: dict[str, Any] = {"architectures": [FAMILIES[model_type].architecture], "model_type": model_type}
    keys = {**_KEYS, **FAMILIES[model_type].keys}
    config |= {theirs: getattr(model, ours) for ours, theirs in keys.items()}
    config["rope_theta"] = model.rope_theta
    config["rope_scaling"] = scaling and {
        "rope_type": "llama3",
        **{theirs: getattr(scaling, ours) for ours, theirs in _ROPE_KEYS.items()},
    }
    config |= {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0}
    if model_type == "llama":
        config["mlp_bias"] = False
    if isinstance(model, schema.Qwen3MoeModel):
        # The published models' width of a dense layer, of which they have none.
        config |= {"intermediate_size": model.top_k * model.ffn_dim, "decoder_sparse_step": 1, "mlp_only_layers": []}
        config |= {"output_router_logits": False, "router_aux_loss_coef": model.router_aux_loss_coef}
    config |= {"max_position_embeddings": max_positions, "initializer_range": model.init_std, "use_cache": True}
    # Null and not left out: the families have defaults of their own, which are other tokens.
    return config | {
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": eos_json(eos_ids),
        "torch_dtype": dtype,
    }


def eos_json(eos_ids: tuple[int, ...]) -> int | list[int] | None:
    """`eos_token_id` as files have it: a number where there is one, null where there is none."""
    return list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is no file, or it has no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path}: no such file; expected a folder with config.json and safetensors") from error
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds {show(content)[:40]}, expected a JSON object")
    return content


def _family(config: Mapping[str, Any], path: Path) -> _Family:
    model_type, architectures = config.get("model_type"), config.get("architectures")
    known = ", ".join(family.architecture for family in FAMILIES.values())
    if model_type not in tuple(FAMILIES):
        raise ValueError(f"{path}: model_type is {show(model_type)}, expected {' or '.join(FAMILIES)} ({known})")
    family = FAMILIES[model_type]
    if architectures not in (None, [family.architecture]):
        raise ValueError(f"{path}: architectures is {show(architectures)}, expected ['{family.architecture}']")
    return family


def _sizes(config: Mapping[str, Any], family: _Family) -> dict[str, Any]:
    """The schema's keys, with those of `config` and of what follows from it; what is missing stays out."""
    values: dict[str, Any] = {"family": {"llama": "llama3"}.get(config["model_type"], config["model_type"])}
    keys = {**_KEYS, **family.keys}
    values |= {ours: config[theirs] for ours, theirs in keys.items() if config.get(theirs) is not None}
    dim, heads, positions = values.get("dim"), values.get("num_heads"), config["max_position_embeddings"]
    if heads is not None:
        values.setdefault("num_kv_heads", heads)
    if isinstance(dim, int) and isinstance(heads, int) and heads > 0 and dim % heads == 0:
        values.setdefault("head_dim", dim // heads)
    values["seq_len"] = min(positions, family.seq_len) if isinstance(positions, int) else positions
    return values


def _rope(config: Mapping[str, Any]) -> tuple[str, Any]:
    """The settings of rotary embeddings, and their key: `transformers` 4 writes the one, 5 the other."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    return key, config.get(key) or {}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    if _rope_type(rope) != "llama3":
        return None
    found = {ours: rope[theirs] for ours, theirs in _ROPE_KEYS.items() if theirs in rope}
    return {"original_max_positions": config["max_position_embeddings"], **found}


def _rope_problems(key: str, rope: Any, family: _Family) -> Iterator[str]:
    if not isinstance(rope, dict):
        yield f"{key} is {show(rope)}, expected an object or null"
        return
    types = ("default", "llama3") if family.section is schema.Llama3Model else ("default",)
    if _rope_type(rope) not in types:
        yield f"{key}.rope_type is {show(_rope_type(rope))}, expected {' or '.join(types)}"
        return
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS.values()}
    for name in sorted(rope.keys() - known):
        yield f"{key}.{name} is {show(rope[name])}, expected none but {', '.join(sorted(known))} in {key}"
    if (factor := rope.get("partial_rotary_factor", 1)) != 1:
        yield f"{key}.partial_rotary_factor is {show(factor)}, expected 1: {_REQUIRED['partial_rotary_factor'][1]}"


def _differences(config: Mapping[str, Any]) -> Iterator[str]:
    """What would have to be computed otherwise than it is here."""
    for key, (value, reason) in _REQUIRED.items():
        if config.get(key) not in (None, value):
            yield f"{key} is {show(config[key])}, expected {show(value)}: {reason}"


def _misfits(model: Model, config: Mapping[str, Any]) -> Iterator[str]:
    """Rules across keys."""
    if model.num_heads % model.num_kv_heads:
        yield (
            f"num_key_value_heads is {model.num_kv_heads}, which does not divide num_attention_heads, {model.num_heads}"
        )
    if model.head_dim % 2:
        yield f"head_dim is {model.head_dim}; rotary embeddings need an even number"
    if isinstance(model, schema.Qwen3MoeModel):
        if model.top_k > model.num_experts:
            yield f"num_experts_per_tok is {model.top_k}, more than num_experts, {model.num_experts}"
        yield from _moe_windows(config)
    if isinstance(model, schema.Qwen3Model):  # Llama's configuration has no windows
        yield from _windows(model, config)


def _windows(model: schema.Qwen3Model, config: Mapping[str, Any]) -> Iterator[str]:
    """Layers whose tokens see only those within a window."""
    types, first = config.get("layer_types"), config.get("max_window_layers", 28)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if types not in (None, ["full_attention"] * model.num_layers):
        yield f"layer_types is {show(types)[:80]}, expected 'full_attention' for each of {model.num_layers} layers"
    elif types is None and window is not None and not (isinstance(first, int) and first >= model.num_layers):
        yield f"sliding_window is {show(window)} from layer {show(first)} on, expected use_sliding_window=false"


def _moe_windows(config: Mapping[str, Any]) -> Iterator[str]:
    """The same of the mixture of experts, where all layers have the window, whatever `max_window_layers` says."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    if window is not None:
        yield f"sliding_window is {show(window)}, expected use_sliding_window=false"


def _ids(value: Any) -> tuple[int, ...] | None:
    """Token ids of null, a number or a list; None for anything else."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(ids) if all(type(i) is int for i in ids) else None
