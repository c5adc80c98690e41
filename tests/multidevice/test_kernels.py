"""Kernels and expert parallelism on meshes: the reference on one device is what they must equal."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.multidevice.meshes import Result, assert_equal, on, train
from tests.unit.runs import ADAMW, LLAMA3, QWEN3, QWEN3_MOE, REFERENCE_KERNELS, make_run, random_batches
from tpu_train.config import kernel_schema, schema
from tpu_train.execution.paper import PaperRuntime
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.collective_report import as_text
from tpu_train.training.engine import Engine
from tpu_train.training.graph_view import describe_graph

ROWS, STEPS = 16, 6
KERNELS = dataclasses.replace(
    REFERENCE_KERNELS,
    attention=kernel_schema.BlockwiseAttention(name="blockwise", block_q=16, block_kv=16),
    loss=kernel_schema.FusedLoss(name="fused", implementation="blockwise"),
    moe=kernel_schema.GroupedMoe(name="grouped", implementation="ragged"),
)


def make(model: Any, **training: Any) -> schema.Run:
    training = {"batch_per_device": None, "global_batch_size": ROWS, "max_grad_norm": 0.3, **training}
    return make_run(model=model, optimizer=dataclasses.replace(ADAMW, lr=3e-4), training=training)


def batches_of(run: schema.Run) -> list[dict[str, np.ndarray]]:
    sized = dataclasses.replace(run, training=dataclasses.replace(run.training, batch_per_device=ROWS))
    return random_batches(STEPS, sized, ignored=True)


def with_kernels(run: schema.Run) -> schema.Run:
    return dataclasses.replace(run, kernels=KERNELS)


@pytest.mark.parametrize("model", [LLAMA3, dataclasses.replace(QWEN3, vocab_size=509)], ids=["llama3", "qwen3_509"])
def test_kernels_equal_the_reference_on_one_device_and_on_meshes(model: Any) -> None:
    run = make(model)
    batches = batches_of(run)
    one = train(run, batches)
    assert_equal(run, one, train(with_kernels(run), batches))
    for mesh in (("fsdp", 1, -1, 1), ("fsdp_tp", 1, 2, 4)):
        assert_equal(run, one, train(on(with_kernels(run), mesh), batches))


# More experts are used than there are devices, some by nobody: the router's bias is the tokens' own.
MOE = dataclasses.replace(QWEN3_MOE, num_experts=8, vocab_size=509)
EP_MESHES: list[tuple[tuple[str, int, int, int], int]] = [
    (("ep", 1, 1, 1), 8),
    (("fsdp_ep", 1, 4, 1), 2),
    (("fsdp_ep", 2, 2, 1), 2),
    (("fsdp", 1, 8, 1), 1),
]


def drops(result: Result) -> set[float]:
    return {m["router_dropped"] for m in result.metrics}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_expert_parallel_training_equals_one_device(accumulation: int) -> None:
    run = make(MOE, grad_accumulation=accumulation)
    batches = batches_of(run)
    one = train(run, batches)
    loads = [(m["router_load_min"], m["router_load_max"]) for m in one.metrics]
    assert max(high for _, high in loads) > 1.5, "the experts' loads must be uneven"
    for mesh, expert in EP_MESHES:
        many = train(on(with_kernels(run), mesh, expert=expert), batches)
        assert_equal(run, one, many)
        assert drops(many) == {0.0}


def test_an_expert_that_gets_nothing_and_one_that_gets_everything() -> None:
    run = make(dataclasses.replace(MOE, top_k=1))
    runtime = Runtime("cpu", 8)
    engines = [Engine(run, Runtime("cpu")), Engine(on(run, ("fsdp_ep", 1, 2, 1), expert=4), runtime)]
    batch = batches_of(run)[0]
    found = []
    for engine in engines:
        state = engine.initial_state()
        values = {name: np.array(value) for name, value in state["params"].items()}
        for name, value in values.items():
            if name.endswith("router.weight"):  # equal rows: every tie goes to the first expert
                value[:] = value[:1]
        state["params"] = engine.place(values.__getitem__)
        _, metrics = engine.step(state, batch, 0.0)
        found.append({name: float(value) for name, value in metrics.items()})
    one, many = found
    assert one["router_load_max"] == many["router_load_max"] == MOE.num_experts
    assert one["router_load_min"] == many["router_load_min"] == 0
    assert many["router_dropped"] == 0
    np.testing.assert_allclose([many["loss"], many["grad_norm"]], [one["loss"], one["grad_norm"]], rtol=1e-5)


def test_rows_beyond_the_bound_are_dropped_and_counted() -> None:
    run = make(dataclasses.replace(MOE, top_k=1))
    engine = Engine(on(run, ("ep", 1, 1, 1), expert=8, expert_bound=2.0), Runtime("cpu", 8))
    state = engine.initial_state()
    values = {name: np.array(value) for name, value in state["params"].items()}
    for name, value in values.items():
        if name.endswith("router.weight"):
            value[:] = value[:1]
    state["params"] = engine.place(values.__getitem__)
    _, metrics = engine.step(state, batches_of(run)[0], 0.0)
    # All rows want the first device, which has room for twice what each of eight sends: three quarters find none.
    rows = ROWS * run.training.seq_len * MOE.num_layers
    assert float(metrics["router_dropped"]) == rows * 6 / 8
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.parametrize(("mesh", "expert"), EP_MESHES, ids=["ep", "fsdp_ep_4_2", "fsdp_ep_2_2_2", "fsdp"])
def test_collectives_are_what_theory_expects(mesh: tuple[str, int, int, int], expert: int) -> None:
    run = make_run(model=MOE, training={"batch_per_device": 2, "grad_accumulation": 2})
    run = dataclasses.replace(run, runtime=dataclasses.replace(run.runtime, devices=8))
    found, text = describe_graph(on(run, mesh, expert=expert))
    assert found["as_expected"], text
    assert as_text(found["collectives"]) in text


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"experts.gate has 8 experts, which expert=3 does not divide"):
        Engine(on(make(MOE, global_batch_size=18), ("ep", 1, 1, 1), expert=3), PaperRuntime(3))
