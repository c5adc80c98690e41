"""The collectives of captured steps: as many as theory says, and for the first layer the ones written out here."""

from collections import Counter

import pytest

from tests.multidevice.meshes import IDS, MESHES, on
from tests.unit.runs import LLAMA3, QWEN3, make_run
from tpu_train.config import schema
from tpu_train.execution.paper import PaperRuntime
from tpu_train.graph.collective_report import as_text, count, find_collectives, table
from tpu_train.sharding.theory import Use
from tpu_train.training.engine import Engine
from tpu_train.training.graph_view import describe_graph

MATRICES = ("attention.key", "attention.output", "attention.query", "attention.value",
            "feed_forward.down", "feed_forward.gate", "feed_forward.up")  # fmt: skip
NORMS = ("attention_norm", "feed_forward_norm")


def of_first_layer(run: schema.Run, num_devices: int = 8) -> Counter[Use]:
    engine = Engine(run, PaperRuntime(num_devices))
    specs = engine.step_specs(16, run.training.seq_len, ["tokens", "labels"])
    counted = count(find_collectives(engine.train_step.capture(**specs)))
    return Counter({use: number for use, number in counted.items() if use.label.startswith("layers.0.")})


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_an_fsdp_layer_gathers_each_parameter_once_a_pass_and_scatters_each_gradient_once(
    reshard: bool, accumulation: int
) -> None:
    run = make_run(model=LLAMA3, training={"grad_accumulation": accumulation})
    found = of_first_layer(on(run, ("fsdp", 1, 8, 1), reshard_after_forward=reshard, replicate_below=65))
    names = [f"layers.0.{name}.weight" for name in MATRICES]
    expected = Counter({Use("all_gather", "fsdp", name, "forward"): accumulation for name in names})
    expected |= Counter({Use("reduce_scatter", "fsdp", name, "backward"): accumulation for name in names})
    if reshard:
        expected |= Counter({Use("all_gather", "fsdp", name, "backward"): accumulation for name in names})
    # Vectors of 64 are copies, whose gradients are summed once a step, not once a microbatch.
    expected |= Counter({Use("all_reduce", "fsdp", f"layers.0.{name}.weight", "update"): 1 for name in NORMS})
    assert found == expected


def test_hybrid_sharding_gathers_inside_a_slice_and_sums_shards_over_slices() -> None:
    found = of_first_layer(on(make_run(model=LLAMA3), ("fsdp_2d", 2, 4, 1)))
    name = "layers.0.attention.query.weight"
    assert {use: number for use, number in found.items() if use.label == name} == {
        Use("all_gather", "fsdp", name, "forward"): 1,
        Use("all_gather", "fsdp", name, "backward"): 1,
        Use("reduce_scatter", "fsdp", name, "backward"): 1,
        Use("all_reduce", "replica", name, "update"): 1,
    }


def test_a_tensor_parallel_layer_has_two_pairs_a_pass() -> None:
    found = of_first_layer(on(make_run(model=LLAMA3), ("tp", 1, 1, 4)), 4)
    assert {use: number for use, number in found.items() if use.op != "all_reduce"} == {
        Use("all_gather", "tensor", "layers.0.attention", "forward"): 1,
        Use("reduce_scatter", "tensor", "layers.0.attention.output", "forward"): 1,
        Use("all_gather", "tensor", "layers.0.feed_forward", "forward"): 1,
        Use("reduce_scatter", "tensor", "layers.0.feed_forward.down", "forward"): 1,
        Use("reduce_scatter", "tensor", "layers.0.attention", "backward"): 1,
        Use("all_gather", "tensor", "layers.0.attention.output", "backward"): 1,
        Use("reduce_scatter", "tensor", "layers.0.feed_forward", "backward"): 1,
        Use("all_gather", "tensor", "layers.0.feed_forward.down", "backward"): 1,
    }


@pytest.mark.parametrize("mesh", MESHES, ids=IDS)
@pytest.mark.parametrize("model", [LLAMA3, QWEN3], ids=["llama3", "qwen3_tied"])
def test_every_choice_has_what_theory_expects(model: schema.DecoderModel, mesh: tuple[str, int, int, int]) -> None:
    run = make_run(
        model=model,
        runtime=schema.Runtime(**{**vars(make_run().runtime), "devices": 8}),
        training={"batch_per_device": 2, "grad_accumulation": 2},
    )
    found, text = describe_graph(on(run, mesh))
    assert found["as_expected"], text
    assert sum(row["count"] for row in found["collectives"]) > 10


def test_bytes_are_of_the_gathered_weight_in_the_compute_dtype_and_of_the_gradient_in_the_reduce_dtype() -> None:
    mixed = schema.Precision(param="float32", compute="bfloat16", matmul="default")
    run = on(make_run(model=LLAMA3, precision=mixed), ("fsdp", 1, 8, 1))
    engine = Engine(run, PaperRuntime(8))
    specs = engine.step_specs(8, run.training.seq_len, ["tokens", "labels"])
    found = {item.use: item.num_bytes for item in find_collectives(engine.train_step.capture(**specs))}
    name = "layers.0.feed_forward.up.weight"  # [96, 64]
    assert found[Use("all_gather", "fsdp", name, "forward")] == 96 * 64 * 2
    assert found[Use("reduce_scatter", "fsdp", name, "backward")] == 96 * 64 * 4


def test_a_table_tells_what_is_missing() -> None:
    use = Use("all_gather", "fsdp", "layers.0.w", "forward")
    rows = table([], Counter({use: 2}))
    (row,) = rows
    assert (row["part"], row["count"], row["expected"]) == ("layers.0", 0, 2)
    assert as_text(rows).endswith("1 rows are not as theory expects")
