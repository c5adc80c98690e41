"""The debug models' training step, by the real TPU compiler, for one slice and for two, under every choice."""

import dataclasses
import functools
from typing import Any

import pytest

from tests.multidevice.meshes import parallelism
from tests.unit.runs import make_run
from tpu_train.config import schema
from tpu_train.config.compose import compose
from tpu_train.execution.paper import PaperRuntime
from tpu_train.planning.topology import tpu_devices
from tpu_train.training.engine import Engine

MIXED = schema.Precision(param="float32", compute="bfloat16", matmul="default")
SLICES = {"v5p:2x2x2": 1, "v5e:2x2": 2}
# Sizes as the YAML has them; over two slices the replica axis is laid over them.
CHOICES: dict[str, tuple[int | None, int, int]] = {
    "ddp": (-1, 1, 1),
    "fsdp": (1, -1, 1),
    "fsdp_2d": (None, -1, 1),
    "tp": (1, 1, -1),
    "fsdp_tp": (1, -1, 2),
}


@functools.cache
def debug_model(name: str) -> Any:
    return dataclasses.replace(compose([f"model={name}"]).run.model, num_layers=2)


def compiled_step(run: schema.Run, runtime: PaperRuntime) -> Any:
    engine = Engine(run, runtime)
    fields = ["tokens", "labels", "positions", "segment_ids"]
    specs = engine.step_specs(16, run.training.seq_len, fields)
    return engine.train_step.lower(**engine.train_step.structs(specs)).compile()


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("topology", SLICES)
@pytest.mark.parametrize("model", ["llama3_debug", "qwen3_debug"])
def test_the_step_compiles(model: str, topology: str, choice: str) -> None:
    slices = SLICES[topology]
    runtime = PaperRuntime(tpu_devices(topology, slices), "tpu")
    assert (len(runtime.devices), runtime.num_slices) == (8, slices)
    replica, fsdp, tensor = CHOICES[choice]
    mesh = parallelism(choice, slices if replica == 1 else replica, fsdp, tensor)
    training = {"batch_per_device": None, "global_batch_size": 16, "grad_accumulation": 2, "seq_len": 64}
    run = make_run(model=debug_model(model), precision=MIXED, parallelism=mesh, training=training)
    text = compiled_step(run, runtime).as_text()
    assert ("all-reduce" if choice == "ddp" else "all-gather") in text


def test_replicas_that_do_not_fit_the_slices_are_refused() -> None:
    runtime = PaperRuntime(tpu_devices("v5e:2x2", 2), "tpu")
    with pytest.raises(ValueError, match=r"parallelism.replica=1 cannot be laid over 2 slices; use a multiple of 2"):
        Engine(make_run(parallelism=parallelism("fsdp", 1, -1, 1)), runtime)


def test_a_topology_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="topology v9:1x1"):
        tpu_devices("v9:1x1")
