"""Parameters' names here and at Hugging Face, for the families that both have.

Key idea: Llama 3 and Qwen3 share one naming, so a name is translated by tables and no pattern, and a parameter that
the tables lack is found by its absence. Experts are one stacked parameter here and a tensor each in a folder, as the
published ones have it.
"""

from collections.abc import Sequence

_OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "feed_forward.router": "mlp.gate",
}
_STACKED = {
    "feed_forward.experts.gate": "gate_proj",
    "feed_forward.experts.up": "up_proj",
    "feed_forward.experts.down": "down_proj",
}

EMBEDDING = _OUTSIDE_LAYERS["embedding.weight"]
OUTPUT = _OUTSIDE_LAYERS["output.weight"]


def hf_name(name: str) -> str:
    """Hugging Face's name of a parameter that is not stacked.

    `model.layers.3.mlp.up_proj.weight` of `layers.3.feed_forward.up.weight`.
    """
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    layers, index, block = name.removesuffix(".weight").split(".", 2)
    assert layers == "layers", name
    return f"model.layers.{index}.{_IN_LAYER[block]}.weight"


def hf_tensors(name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The tensors, with their shapes, that a parameter of this shape is in a folder; several are its dimension 0."""
    if not is_stacked(name):
        return {hf_name(name): tuple(shape)}
    _, index, block = name.split(".", 2)
    prefix = f"model.layers.{index}.mlp.experts"
    return {f"{prefix}.{expert}.{_STACKED[block]}.weight": tuple(shape[1:]) for expert in range(shape[0])}


def is_stacked(name: str) -> bool:
    """Whether a parameter is several tensors of a folder."""
    return name.startswith("layers.") and name.split(".", 2)[2] in _STACKED


def is_recomputed(name: str) -> bool:
    """Whether a tensor of a folder holds rotary frequencies, which old conversions stored and nobody reads."""
    return name.endswith(".rotary_emb.inv_freq")
