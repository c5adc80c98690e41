"""Shipped models by name, and small models with weights large enough to make every block matter."""

from pathlib import Path
from typing import Any

import torch
import yaml

from tpu_train.models.decoder import Decoder
from tpu_train.models.families import FAMILIES
from tpu_train.models.node import Node

CONF = Path(__file__).parents[3] / "conf" / "model"

# Published counts (DESIGN.md section 5).
PARAMETERS = {
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "qwen3_30b": 30_532_122_624,
    "qwen3_235b": 235_093_634_560,
}
SHIPPED = [*PARAMETERS, "llama3_debug", "qwen3_debug", "qwen3_moe_debug"]

SMALL = {
    "dim": 48,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_dim": 64,
    "vocab_size": 97,
    "rope_theta": 10000.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
}
# Of a mixture of experts, besides.
SMALL_MOE = {"num_experts": 5, "top_k": 2, "norm_topk_prob": True}


def small_sizes(family: str, **changes: Any) -> dict[str, Any]:
    """The sizes of a small model."""
    return {**SMALL, **(SMALL_MOE if family == "qwen3_moe" else {}), **changes}


def shipped_sizes(name: str) -> dict[str, Any]:
    """The keys of `conf/model/<name>.yaml` that describe the model: all but Hydra's defaults list."""
    sizes = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    del sizes["defaults"]
    return sizes


def shipped_tree(name: str) -> Node:
    """The config tree of a shipped model."""
    sizes = shipped_sizes(name)
    del sizes["seq_len"]
    return FAMILIES[sizes.pop("family")](**sizes)


def small_tree(family: str = "llama3", **changes: Any) -> Node:
    """The config tree of a small model; H * N is not D."""
    return FAMILIES[family](**small_sizes(family, **changes))


def small_model(family: str = "llama3", **changes: Any) -> Decoder:
    """A small model in evaluation mode, all its parameters random, with logits of about one."""
    torch.manual_seed(0)
    model = small_tree(family, **changes).build()
    assert isinstance(model, Decoder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(mean=float(weight.ndim == 1), std=0.15)
    return model.eval()
