"""JAX functions as PyTorch ops: schema, shapes, derivative, every capture, and what is refused."""

import itertools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_train.execution.program import Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import TensorSpec, capture
from tpu_train.kernels.jax_op import JaxOp, jax_op, register_natively
from tpu_train.lowering.table import TABLE

_names = (f"tpu_train_test::op{i}" for i in itertools.count())


def make(function: Callable[..., Any], **options: Any) -> JaxOp:
    return jax_op(next(_names), **options)(function)


def derived(x: jax.Array, w: jax.Array, offset: jax.Array | None = None, *, power: int = 2) -> jax.Array:
    """Derived by JAX."""
    y = jnp.tanh(x @ w) ** power
    return y if offset is None else y + offset


def in_torch(x: torch.Tensor, w: torch.Tensor, offset: torch.Tensor | None = None, *, power: int = 2) -> torch.Tensor:
    y = torch.tanh(x @ w) ** power
    return y if offset is None else y + offset


CALLS: list[str] = []


@jax.custom_vjp
def _doubled(x: jax.Array) -> jax.Array:
    CALLS.append("primal")
    return x * 2


def _doubled_forward(x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    CALLS.append("forward")
    return x * 2, (x, jnp.exp(x))


def _doubled_backward(residuals: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array]:
    CALLS.append("backward")
    return (grad * 2 + 0 * residuals[1],)


_doubled.defvjp(_doubled_forward, _doubled_backward)


def doubled(x: jax.Array) -> jax.Array:
    """With a derivative of its own."""
    return _doubled(x)


def two(x: jax.Array, ids: jax.Array, *, kind: Literal["sum", "max"] = "sum") -> tuple[jax.Array, jax.Array]:
    """Two outputs, an integer argument and a word."""
    return jnp.where(ids > 0, x, 0), (jnp.sum if kind == "sum" else jnp.max)(x, 1)


DERIVED, DOUBLED, TWO = make(derived), make(doubled), make(two)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in ((3, 4), (4, 5)))  # type: ignore[return-value]


def test_the_schema_follows_from_the_annotations() -> None:
    assert str(DERIVED.op._schema).endswith("(Tensor x, Tensor w, Tensor? offset=None, *, int power=2) -> Tensor")
    assert str(TWO.op._schema).endswith('(Tensor x, Tensor ids, *, str kind="sum") -> (Tensor, Tensor)')


def test_an_eager_call_computes_on_the_cpu_with_its_derivative() -> None:
    x, w = inputs()
    offset = torch.ones((), requires_grad=True)  # a scalar is an argument like others
    for options in ({}, {"power": 3}):
        found = DERIVED(x, w, offset, **options)
        expected = in_torch(x, w, offset, **options)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(y.square().sum(), (x, w, offset)) for y in (found, expected)]
        torch.testing.assert_close(*grads)
    assert not DERIVED(x.detach(), w.detach()).requires_grad


def test_bfloat16_and_64_bit_integers_go_through() -> None:
    x = torch.randn(3, 4).bfloat16()
    first, second = TWO(x, torch.tensor([[0, 1, 2, 0]]), kind="max")
    torch.testing.assert_close(first, x * torch.tensor([0, 1, 1, 0]).bfloat16())
    torch.testing.assert_close(second, x.amax(1))


@pytest.mark.parametrize("op", [DERIVED, DOUBLED, TWO], ids=["derived", "own_derivative", "two_outputs"])
def test_opcheck(op: JaxOp) -> None:
    x, w = inputs()
    arguments = {DERIVED: (x, w), DOUBLED: (x,), TWO: (x, torch.ones(3, 4, dtype=torch.int32))}[op]
    torch.library.opcheck(op.op, arguments)
    torch.library.opcheck(op.op, tuple(a.detach() for a in arguments))


def test_a_derivative_of_ones_own_is_used_and_the_forward_runs_once() -> None:
    x, _ = inputs()
    CALLS.clear()
    graph = make_fx(lambda x: torch.autograd.grad(DOUBLED(x).sum(), x), tracing_mode="fake")(x)
    targets = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert targets.count(DOUBLED.forward_op) == targets.count(DOUBLED.backward_op) == 1
    assert DOUBLED.op not in targets
    assert "primal" not in CALLS
    # The residual that is the input is not made again: the forward gives the output and exp(x).
    (node,) = (n for n in graph.graph.nodes if n.target is DOUBLED.forward_op)
    assert len(node.meta["val"]) == 2


def tanh(x: jax.Array, w: jax.Array) -> jax.Array:
    """Its derivative needs its result."""
    return _tanh(x) * w


@jax.custom_vjp
def _tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


_tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, grad: (grad * (1 - y * y),))


def test_a_tensor_given_twice_is_two_arguments() -> None:
    op = make(tanh)

    def step(x: torch.Tensor) -> dict[str, Any]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            loss = op(x, x).sum()
        return {"grad": torch.autograd.grad(loss, x)[0]}

    runtime = Runtime("cpu")
    program = Program("step", lambda found: capture("step", step, found))
    x = torch.linspace(-2, 2, 5)
    found = runtime.fetch(program(**runtime.put({"x": x.numpy()})))["grad"]
    torch.testing.assert_close(torch.tensor(found), torch.tanh(x) + x * (1 - torch.tanh(x) ** 2))


def test_a_captured_program_holds_one_node_each_and_runs_in_xla() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> dict[str, Any]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        with torch.enable_grad():
            loss = DERIVED(x, w, power=3).square().sum()
        grads = torch.autograd.grad(loss, (x, w))
        return {"loss": loss.detach(), "grads": grads}

    specs = {"x": TensorSpec((3, 4), torch.float32), "w": TensorSpec((4, 5), torch.float32)}
    captured = capture("step", step, specs)
    targets = [node.target for node in captured.graph.graph.nodes]
    assert targets.count(DERIVED.forward_op) == targets.count(DERIVED.backward_op) == 1
    x, w = inputs()
    runtime = Runtime("cpu")
    program = Program("step", lambda found: capture("step", step, found))
    result = runtime.fetch(program(**runtime.put({"x": x.detach().numpy(), "w": w.detach().numpy()})))
    expected = in_torch(x, w, power=3).square().sum()
    torch.testing.assert_close(torch.tensor(result["loss"]), expected.detach())
    for found, right in zip(result["grads"], torch.autograd.grad(expected, (x, w)), strict=True):
        torch.testing.assert_close(torch.tensor(found), right)


def test_torch_compile() -> None:
    x, w = inputs()

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return DERIVED(x.sin(), w).square().sum()

    found = torch.compile(f, fullgraph=True, backend="aot_eager")(x, w)
    torch.testing.assert_close(found, in_torch(x.sin(), w).square().sum())
    torch.testing.assert_close(torch.autograd.grad(found, (x, w)), torch.autograd.grad(f(x, w), (x, w)))


def test_under_shard_map_each_device_computes_its_part() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]), ("data",))
    spec = jax.sharding.PartitionSpec("data")
    x = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    run = jax.jit(jax.shard_map(TABLE[DOUBLED.op], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    assert (run(x) == 2 * x).all()


def test_wrong_annotations_are_refused() -> None:
    def bare(x: jax.Array, y) -> jax.Array:  # type: ignore[no-untyped-def]
        return x

    def wrong(x: jax.Array, y: list[str]) -> jax.Array:
        return x

    def returns(x: jax.Array) -> list[jax.Array]:
        return [x]

    def keyword(*, x: jax.Array) -> jax.Array:
        return x

    for function, message in [
        (bare, "argument y has no annotation"),
        (wrong, r"argument y is annotated list\[str\]; allowed are jax.Array, int"),
        (returns, "returns list"),
        (keyword, "array argument x must be positional"),
    ]:
        with pytest.raises(TypeError, match=message):
            make(function)


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match=r"is taken by derived in .*test_jax_op.py; choose another"):
        jax_op(DERIVED.name)(two)
    with pytest.raises(ValueError, match="a name has the form namespace::name"):
        jax_op("nameless")
    with pytest.raises(ValueError, match="donate names power, which is no array argument"):
        make(derived, donate=("power",))


def test_arguments_and_shapes_that_do_not_fit_are_refused() -> None:
    def only_even(x: jax.Array) -> jax.Array:
        if x.shape[0] % 2:
            raise ValueError(f"{x.shape[0]} rows; the kernel takes an even number")
        return x

    op = make(only_even)
    with pytest.raises(ValueError, match=r"tpu_train_test::op.*: 3 rows; the kernel takes an even number"):
        op(torch.ones(3))
    with pytest.raises(ValueError, match="3 rows; the kernel takes an even number"):
        capture("f", lambda x: {"y": op(x)}, {"x": TensorSpec((3,), torch.float32)})
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor'"):
        op("x")
    with pytest.raises(ValueError, match=r"a tensor of torch.complex64 has no counterpart in JAX"):
        op(torch.ones(2, dtype=torch.complex64))


def test_a_donated_argument_gives_its_buffer_to_the_result() -> None:
    op = make(doubled, donate=("x",))
    x = torch.ones(4)
    torch.testing.assert_close(op(x), 2 * torch.ones(4))


def test_the_native_backend_gets_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"torch.tpu.pallas.jax_op is not there; install torch_tpu"):
        register_natively(DERIVED)

    class Native:
        class pallas:
            @staticmethod
            def jax_op(name: str) -> Callable[[Any], Any]:
                return lambda function: (name, function)

    monkeypatch.setattr(torch, "tpu", Native, raising=False)
    assert register_natively(DERIVED) == (DERIVED.name, derived)
