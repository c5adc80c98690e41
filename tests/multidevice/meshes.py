"""Runs of tiny models on meshes of virtual CPU devices, and their comparison with one device."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from tpu_train.config import parallelism_schema, schema
from tpu_train.config.parallelism_schema import MeshParallelism
from tpu_train.execution.runtime import Runtime
from tpu_train.training.engine import Engine

PARALLELISMS = {
    "ddp": parallelism_schema.DdpParallelism,
    "fsdp": parallelism_schema.FsdpParallelism,
    "fsdp_2d": parallelism_schema.Fsdp2dParallelism,
    "tp": parallelism_schema.TpParallelism,
    "fsdp_tp": parallelism_schema.FsdpTpParallelism,
    "ep": parallelism_schema.EpParallelism,
    "fsdp_ep": parallelism_schema.FsdpEpParallelism,
}
# Every choice, and the two-dimensional ones both ways: name, replica, fsdp, tensor.
MESHES = [
    ("ddp", -1, 1, 1),
    ("fsdp", 1, -1, 1),
    ("fsdp_2d", 2, 4, 1),
    ("fsdp_2d", 4, 2, 1),
    ("tp", 1, 1, -1),
    ("fsdp_tp", 1, 4, 2),
    ("fsdp_tp", 1, 2, 4),
]
IDS = ["_".join(map(str, mesh)) for mesh in MESHES]


def parallelism(name: str, replica: int | None, fsdp: int, tensor: int, **changes: Any) -> MeshParallelism:
    """A choice that splits even the smallest parameters."""
    settings = {
        "reshard_after_forward": True,
        "reduce": "float32",
        "replicate_below": 0,
        "expert": 1,
        "expert_bound": 8.0,
        **changes,
    }
    return PARALLELISMS[name](name=name, replica=replica, fsdp=fsdp, tensor=tensor, **settings)


def on(run: schema.Run, mesh: tuple[str, int, int, int], **changes: Any) -> schema.Run:
    """The run with another parallelism."""
    return dataclasses.replace(run, parallelism=parallelism(*mesh, **changes))


class Result(NamedTuple):
    """Initial weights, metrics of each step and final weights, each as the model has them, without padding."""

    initial: dict[str, np.ndarray]
    metrics: list[dict[str, float]]
    final: dict[str, np.ndarray]


def weights(engine: Engine, state: Any) -> dict[str, np.ndarray]:
    """The trained parameters on the host."""
    layouts = engine.parallel.layouts
    return {n: np.array(v)[tuple(map(slice, layouts[n].shape))] for n, v in state["params"].items()}


def train(run: schema.Run, batches: list[dict[str, np.ndarray]], num_devices: int = 8) -> Result:
    """Trains on the run's mesh over this many devices; on one where its parallelism is single."""
    runtime = Runtime("cpu", 1 if run.parallelism.name == "single" else num_devices)
    engine = Engine(run, runtime)
    state = engine.initial_state()
    initial = weights(engine, state)
    metrics = []
    for batch in batches:
        state, found = engine.step(state, batch, run.optimizer.lr)
        metrics.append({name: float(value) for name, value in runtime.fetch(found).items()})
    return Result(initial, metrics, weights(engine, state))


def assert_equal(run: schema.Run, one: Result, many: Result) -> None:
    """DESIGN's tolerances: initial weights bitwise, losses and norms, weights by the optimizer."""
    assert one.initial.keys() == many.initial.keys()
    for name, value in one.initial.items():
        np.testing.assert_array_equal(many.initial[name], value, err_msg=name)
    series = {key: [[m[key] for m in result.metrics] for result in (many, one)] for key in one.metrics[0]}
    assert series["weight"][0] == series["weight"][1]
    np.testing.assert_allclose(*series["loss"], rtol=1e-5)
    np.testing.assert_allclose(series["grad_norm"][0][0], series["grad_norm"][1][0], rtol=1e-5)
    np.testing.assert_allclose(*series["grad_norm"], rtol=1e-4)
    sgd = isinstance(run.optimizer, schema.Sgd)
    for name, value in one.final.items():
        assert np.linalg.norm(many.final[name] - value) / np.linalg.norm(value) <= (1e-6 if sgd else 1e-5), name
        if not sgd:
            np.testing.assert_allclose(many.final[name], value, atol=1e-4, rtol=0, err_msg=name)
