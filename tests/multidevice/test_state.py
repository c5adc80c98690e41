"""The state on a mesh: how much of it a device holds, and checkpoints that go from one mesh to another."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multidevice.meshes import on, train, weights
from tests.unit.runs import LLAMA3, QWEN3, make_run, random_batches
from tpu_train.config import schema
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import named_leaves
from tpu_train.training.checkpoints import Checkpoints, checkpoint_meta
from tpu_train.training.engine import Engine
from tpu_train.training.run_folder import RunFolder
from tpu_train.training.saved_run import SHAPES, SavedRun

FSDP = ("fsdp", 1, -1, 1)
ROWS = 8


def make(model: Any = LLAMA3, **changes: Any) -> schema.Run:
    return make_run(model=model, training={"batch_per_device": None, "global_batch_size": ROWS}, **changes)


def batches_of(run: schema.Run, count: int) -> list[dict[str, np.ndarray]]:
    sized = dataclasses.replace(run, training=dataclasses.replace(run.training, batch_per_device=ROWS))
    return random_batches(count, sized)


def engine_on(run: schema.Run, mesh: tuple[str, int, int, int] | None, num_devices: int = 8) -> Engine:
    if mesh is None:
        return Engine(run, Runtime("cpu"))
    return Engine(on(run, mesh), Runtime("cpu", num_devices))


@pytest.mark.parametrize("replicate_below", [0, 1000])
def test_a_device_holds_an_eighth_of_parameters_and_moments_and_what_is_replicated(replicate_below: int) -> None:
    run = make()
    engine = Engine(on(run, FSDP, replicate_below=replicate_below), Runtime("cpu", 8))
    state = engine.initial_state()
    inputs = engine.step_inputs(batches_of(run, 1)[0], 0.0)
    program = engine.train_step.compiled(state=state, **inputs).memory_analysis()
    sizes = {name: math.prod(layout.shape) for name, layout in engine.parallel.layouts.items()}
    replicated = sum(size for size in sizes.values() if size < replicate_below)
    slots = 3  # the parameter and AdamW's two moments, float32
    allowed = slots * 4 * (sum(sizes.values()) // 8 + replicated)
    # Besides them the program takes its part of the batch, and four numbers of the state and the rate.
    batch = sum(value.nbytes for value in batches_of(run, 1)[0].values()) // 8
    assert program.argument_size_in_bytes - batch <= allowed + 5 * 4
    assert (replicated > 0) == (replicate_below > 0)
    # Temporaries hold gathered weights one after the other: less than all of them.
    assert program.alias_size_in_bytes >= slots * 4 * (sum(sizes.values()) // 8)


@pytest.mark.parametrize("model", [LLAMA3, dataclasses.replace(QWEN3, vocab_size=509)], ids=["llama3", "qwen3_509"])
def test_checkpoints_go_from_mesh_to_mesh_bit_by_bit_and_training_goes_on(model: Any, tmp_path: Path) -> None:
    run = make(model)
    batches = batches_of(run, 6)
    one = train(run, batches)
    losses = []
    # Eight, four, two by four, and one device, with a step or two on each.
    places = [(FSDP, 8), (FSDP, 4), (("fsdp_2d", 2, 4, 1), 8), (("fsdp_tp", 1, 2, 3), 6), (None, 1)]
    if model.num_heads % 3:
        places[3] = (("fsdp_tp", 1, 2, 4), 8)
    engine = engine_on(run, *places[0])
    state = engine.initial_state()
    for i, batch in enumerate(batches):
        state, metrics = engine.step(state, batch, run.optimizer.lr)
        losses.append(float(metrics["loss"]))
        if i + 1 < len(places):
            before = {name: np.array(value) for name, value in named_leaves(state)}
            shapes = engine.padded_shapes()
            checkpoints = Checkpoints(tmp_path / str(i))
            checkpoints.save(i + 1, state, {"step": i + 1})
            checkpoints.wait()
            engine = engine_on(run, *places[i + 1])
            state = engine.restore(checkpoints.path(i + 1))
            after = {name: np.array(value) for name, value in named_leaves(state)}
            compare(before, after, shapes, engine.padded_shapes())
    np.testing.assert_allclose(losses, [m["loss"] for m in one.metrics], rtol=1e-5)
    final = weights(engine, state)
    for name, value in one.final.items():
        assert np.linalg.norm(final[name] - value) / np.linalg.norm(value) <= 1e-5, name


def compare(
    before: dict[str, np.ndarray], after: dict[str, np.ndarray], old: dict[str, list[int]], new: dict[str, list[int]]
) -> None:
    """Bitwise, up to the padding of either mesh, which is zero."""
    assert before.keys() == after.keys()
    for name, value in before.items():
        parameter = name.split(".", 2 if name.startswith("optimizer") else 1)[-1]
        shape = old.get(parameter) or new.get(parameter) or value.shape
        inside = tuple(map(slice, shape))
        np.testing.assert_array_equal(after[name][inside], value[inside], err_msg=name)
        assert np.count_nonzero(after[name]) == np.count_nonzero(after[name][inside]), name


def test_what_is_padded_on_a_mesh_is_shown_and_read_in_the_models_own_shape(tmp_path: Path) -> None:
    model = dataclasses.replace(LLAMA3, vocab_size=509, dim=62)
    run = dataclasses.replace(make(model), run_dir=str(tmp_path))
    engine = engine_on(run, ("fsdp_tp", 1, 2, 4))
    state = engine.initial_state()
    assert engine.padded_shapes() == {"embedding.weight": [509, 62], "output.weight": [509, 62]}
    assert state["params"]["output.weight"].shape == (512, 62)
    RunFolder(tmp_path, run).close()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {**checkpoint_meta(run, 1, 0, None, 0), SHAPES: engine.padded_shapes()})
    checkpoints.wait()
    saved = SavedRun(tmp_path)
    source = saved.weights(1)
    alone = engine_on(run, None)
    expected = weights(alone, alone.initial_state())
    assert {name: spec.shape for name, spec in source.specs.items()} == {n: v.shape for n, v in expected.items()}
    for name, value in expected.items():
        np.testing.assert_array_equal(source.load(name), value)
    described = saved.describe(1)["tensors"]
    assert described["params.output.weight"]["shape"] == [509, 62]
    assert described["optimizer.mu.output.weight"]["shape"] == [509, 62]
    json.dumps(described)


def test_given_weights_are_placed_as_they_are(tmp_path: Path) -> None:
    run = make(dataclasses.replace(LLAMA3, vocab_size=509))
    alone = engine_on(run, None)
    expected = weights(alone, alone.initial_state())
    engine = engine_on(run, ("fsdp_tp", 1, 2, 4))
    placed = weights(engine, {"params": engine.place(expected.__getitem__)})
    for name, value in expected.items():
        np.testing.assert_array_equal(placed[name], value)
