"""A whole training step with every TPU kernel, by the real compiler."""

import dataclasses
import re
from typing import Any

import pytest

from tests.unit.runs import make_run
from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.execution.paper import PaperRuntime
from tpu_train.planning.topology import tpu_devices
from tpu_train.training.engine import Engine

MIXED = schema.Precision(param="float32", compute="bfloat16", matmul="default")
VOCABULARY, SEQ_LEN, LAYERS = 151_936, 4096, 2


def compiled_text(model: Any, topology: str) -> str:
    words = ["kernels=tpu", "runtime.platform=tpu", f"training.seq_len={SEQ_LEN}", "parallelism=fsdp", "model=qwen3_8b"]
    shipped = compose(words).run
    training = {"batch_per_device": 1, "seq_len": SEQ_LEN}
    chosen = {"kernels": shipped.kernels, "parallelism": shipped.parallelism}
    run = make_run(model=model, precision=MIXED, training=training, **chosen)
    engine = Engine(run, PaperRuntime(tpu_devices(topology), "tpu"))
    specs = engine.step_specs(engine.mesh.size, SEQ_LEN, ["tokens", "labels", "positions", "segment_ids"])
    return engine.train_step.lower(**engine.train_step.structs(specs)).compile().as_text()


def small(name: str) -> Any:
    """The published model with fewer, narrower layers; heads, experts' width and vocabulary as they are."""
    model = compose([f"model={name}"]).run.model
    return dataclasses.replace(model, num_layers=LAYERS, dim=1024, num_heads=8, num_kv_heads=2)


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
# The mixture has all the kernels, so the dense model is for `full`.
@pytest.mark.parametrize("name", [pytest.param("qwen3_8b", marks=pytest.mark.full), "qwen3_30b"])
def test_the_kernels_are_in_the_program_and_what_they_avoid_is_not(name: str, topology: str) -> None:
    model = small(name)
    if name == "qwen3_30b":
        model = dataclasses.replace(model, num_experts=8, top_k=2)
    text = compiled_text(model, topology)
    calls = text.count('custom_call_target="tpu_custom_call"')
    # Attention forward, dq and dkv; nine products of experts (three, each with two derivatives); three of the loss.
    per_layer = 3 + (9 if name == "qwen3_30b" else 0)
    assert calls == LAYERS * per_layer + 3
    shapes = set(re.findall(r"\[([\d,]+)\]", text))
    assert not [s for s in shapes if s.split(",").count(str(SEQ_LEN)) > 1], "scores"
    assert not [s for s in shapes if {str(SEQ_LEN), str(VOCABULARY)} <= set(s.split(","))], "logits"
