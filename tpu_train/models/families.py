"""The model families by the name that `model.family` has in a config."""

from collections.abc import Callable

from tpu_train.models.llama3 import llama3
from tpu_train.models.node import Node
from tpu_train.models.qwen3 import qwen3
from tpu_train.models.qwen3_moe import qwen3_moe

FAMILIES: dict[str, Callable[..., Node]] = {
    "llama3": llama3,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
