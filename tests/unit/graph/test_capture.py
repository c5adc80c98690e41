"""Captured steps as graphs: size, donation, compile counts, errors that name their place."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.unit.runs import make_run, random_batches
from tpu_train.execution.program import LoweringOptions, Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import CapturedProgram, TensorSpec, capture
from tpu_train.lowering.decompose import UnsupportedOpsError, source_of
from tpu_train.lowering.intrinsics import loop
from tpu_train.lowering.retrace import graph_modules
from tpu_train.training.engine import Engine

RUNTIME = Runtime("cpu")


def engine_with(**training) -> tuple[Engine, dict, dict]:
    run = make_run(training=training)
    engine = Engine(run, RUNTIME)
    return engine, engine.initial_state(), engine.step_inputs(random_batches(1, run)[0], 1e-3)


def count_nodes(captured: CapturedProgram) -> int:
    return sum(len(module.graph.nodes) for module in graph_modules(captured.graph))


def test_the_program_does_not_grow_with_accumulation() -> None:
    sizes = []
    for accumulation in (2, 16):
        engine, state, inputs = engine_with(grad_accumulation=accumulation, batch_per_device=16)
        num_nodes = count_nodes(engine.train_step.capture(state=state, **inputs))
        text = engine.train_step.lower(state=state, **inputs).as_text()
        sizes.append((num_nodes, text.count("\n")))
    assert sizes[0] == sizes[1]


def test_the_loop_body_is_a_sub_graph_that_walks_see() -> None:
    captured = capture(
        "test",
        lambda x: {"y": loop(lambda c, row: [c + row, row.sin()], [x[0]], [x], [])[1][0]},
        {"x": TensorSpec((3, 4), torch.float32)},
    )
    modules = list(graph_modules(captured.graph))
    assert len(modules) == 2
    assert "sin" in modules[1].code


def test_state_is_donated_and_aliased_in_the_compiled_program() -> None:
    engine, state, inputs = engine_with()
    compiled = engine.train_step.compiled(state=state, **inputs)
    donated = {"params", "optimizer", "updates", "step", "halted"}
    num_bytes = sum(leaf.nbytes for name in donated for leaf in _leaves(state[name]))
    # The seed is returned as it came in, which may or may not count as an alias.
    assert compiled.memory_analysis().alias_size_in_bytes - num_bytes in (0, 4)
    old = state["params"]["norm.weight"]
    engine.step(state, random_batches(1, make_run())[0], 1e-3)
    assert old.is_deleted()


def _leaves(tree) -> list:
    return [leaf for value in tree.values() for leaf in _leaves(value)] if isinstance(tree, dict) else [tree]


def test_compiles_once_per_shape_and_names_what_changed(caplog: pytest.LogCaptureFixture) -> None:
    engine, state, _ = engine_with()
    batches = random_batches(3, make_run())
    for batch in batches:
        state, _ = engine.step(state, batch, 1e-3)
    assert engine.train_step.compile_count == 1
    half = {name: value[:4] for name, value in batches[0].items()}
    state, _ = engine.step(state, half, 1e-3)
    assert engine.train_step.compile_count == 2
    assert "batch.tokens was int32[8, 32], now int32[4, 32]" in caplog.text
    engine.step(state, batches[1], 1e-3)
    assert engine.train_step.compile_count == 2


@pytest.mark.parametrize(("precision", "name"), [("default", "DEFAULT"), ("high", "HIGH"), ("highest", "HIGHEST")])
def test_matmul_precision_reaches_every_product(precision: str, name: str) -> None:
    run = make_run()
    run = dataclasses.replace(run, precision=dataclasses.replace(run.precision, matmul=precision))
    engine = Engine(run, RUNTIME)
    inputs = RUNTIME.put({"batch": random_batches(1, run)[0], "lr": np.float32(1e-3)})
    text = engine.train_step.lower(state=engine.initial_state(), **inputs).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) > 20
    # StableHLO leaves the attribute out where it is DEFAULT.
    assert all((f"precision = [{name}, {name}]" in line) or name == "DEFAULT" for line in products)
    assert all("HIGH" not in line for line in products) or name != "DEFAULT"


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float32)


def test_missing_ops_are_listed_with_their_source_lines() -> None:
    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.special.bessel_j0(x)
            return y + torch.special.airy_ai(x)

    model = Bessel()
    with pytest.raises(UnsupportedOpsError) as caught:
        capture("test", lambda x: {"y": model(x)}, {"x": spec(3)})
    message = str(caught.value)
    assert message.startswith("2 op(s)")
    assert "special_bessel_j0.default, called from" in message
    assert "test_capture.py" in message
    assert "(y = torch.special.bessel_j0(x))" in message
    assert "(return y + torch.special.airy_ai(x))" in message


def test_a_missing_op_inside_a_loop_body_is_listed_too() -> None:
    class Bessel(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.bessel_j1(x)

    model = Bessel()
    with pytest.raises(UnsupportedOpsError, match=r"bessel_j1.*\(return torch.special.bessel_j1\(x\)\)"):
        capture("test", lambda x: {"y": loop(lambda c, r: [c, model(r)], [x[0]], [x], [])[1][0]}, {"x": spec(3, 2)})


def test_backward_nodes_name_the_forward_line_they_derive_from() -> None:
    engine, state, inputs = engine_with()
    nodes = engine.train_step.capture(state=state, **inputs).graph.graph.nodes
    silu_backward = [n for n in nodes if n.target is torch.ops.aten.silu_backward.default]
    assert len(silu_backward) == 2
    assert all("feed_forward.py" in source_of(n) and "silu" in source_of(n) for n in silu_backward)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


@pytest.mark.parametrize(("model", "code"), [(Branches(), r"if x\.sum\(\) > 0"), (Picks(), r"x\[x > 0\]")])
def test_what_depends_on_values_is_refused_with_its_line(model: nn.Module, code: str) -> None:
    with pytest.raises(
        ValueError, match=rf"test: at .*test_capture\.py:\d+ \(return .*{code}.*depends on a tensor's value"
    ):
        capture("test", lambda x: {"y": model(x)}, {"x": spec(3)})


@pytest.mark.parametrize(
    "write",
    [lambda x: x.add_(1), lambda x: x[0].add_(1), lambda x: x.__setitem__(0, 5)],
    ids=["itself", "view", "item"],
)
def test_writing_into_an_input_is_refused_by_name(write: Callable[[Tensor], object]) -> None:
    def function(state: dict[str, Tensor]) -> dict[str, Tensor]:
        write(state["mean"])
        return {"y": state["mean"] + 1}

    with pytest.raises(ValueError, match=r"test: state\.mean is written to in place"):
        capture("test", function, {"state": {"mean": spec(3)}})


def test_writing_into_a_loops_input_is_refused() -> None:
    with pytest.raises(ValueError, match="input 1 of a loop's body is written to in place"):
        capture("test", lambda x: {"y": loop(lambda c, r: [c + r.add_(1)], [x[0]], [x], [])[0][0]}, {"x": spec(3, 2)})


def test_a_loop_body_that_closes_over_a_tensor_is_refused() -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        outer = x.sum()
        return {"y": loop(lambda c, r: [c + r * outer], [x[0]], [x], [])[0][0]}

    with pytest.raises(ValueError, match="a tensor from outside of it; pass it in consts"):
        capture("test", function, {"x": spec(3, 2)})


def test_arguments_that_an_entry_refuses_come_with_the_models_line() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.5)[0]

    model = Dropping()
    program = Program("test", lambda specs: capture("test", lambda x: {"y": model(x)}, specs))
    with pytest.raises(ValueError, match=r"dropout_p=0\.5: allowed is .*, called from .*test_capture\.py:\d+ \(return"):
        program(x=RUNTIME.put(np.zeros((1, 2, 3, 8), np.float32)))


def test_another_states_shape_is_named() -> None:
    engine, state, _ = engine_with()
    batch = random_batches(1, make_run())[0]
    state, _ = engine.step(state, batch, 1e-3)
    state["params"]["norm.weight"] = RUNTIME.put(np.zeros(7, np.float32))
    with pytest.raises(TypeError, match=r"state\.params\.norm\.weight was float32\[48\], now float32\[7\]"):
        engine.step(state, batch, 1e-3)


def test_in_place_ops_on_intermediates_are_made_pure() -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        y = x * 2
        y[0] += 1
        y.t()[1].mul_(3)
        return {"y": y}

    program = Program("test", lambda specs: capture("test", function, specs), LoweringOptions(check=True))
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    out = RUNTIME.fetch(program(x=RUNTIME.put(x)))["y"]
    np.testing.assert_array_equal(out, function(torch.from_numpy(x))["y"].numpy())


def test_the_graph_itself_runs_in_plain_pytorch() -> None:
    """The intrinsics have a PyTorch meaning, so a captured graph can be checked without XLA."""

    def function(x: Tensor) -> dict[str, Tensor]:
        carry, ys = loop(lambda c, row: [c + row, c * row], [torch.zeros(4)], [x], [], reverse=True)
        return {"carry": carry[0], "ys": ys[0]}

    captured = capture("test", function, {"x": spec(3, 4)})
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    outputs = captured.graph(x)
    program = Program("test", lambda specs: capture("test", function, specs), LoweringOptions(check=True))
    expected = RUNTIME.fetch(program(x=RUNTIME.put(x.numpy())))
    suffix_sums = x.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(outputs[captured.outputs["carry"]], x.sum(0))
    torch.testing.assert_close(outputs[captured.outputs["ys"]], (suffix_sums - x) * x)
    np.testing.assert_allclose(expected["carry"], x.sum(0), rtol=1e-6)
    np.testing.assert_allclose(expected["ys"], (suffix_sums - x) * x, rtol=1e-5, atol=1e-6)
