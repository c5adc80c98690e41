"""Values and gradients of the grouped matmul against fp64, and what is refused."""

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tpu_train.kernels.moe import limits, pallas, ragged, reference
from tpu_train.kernels.moe.cases import CASES, Case

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "pallas": functools.partial(pallas.grouped_matmul, interpret=True),
    "ragged": ragged.grouped_matmul,
}
# Most of the time goes into compiling what the interpreter makes of a kernel.
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2}
PARAMETERS = [pytest.param(case, id=case.name, marks=[pytest.mark.full] * case.full) for case in CASES]


def options(case: Case, function: Callable[..., Any]) -> dict[str, Any]:
    names = ("block_rows", "block_in", "block_out")
    return {name: getattr(case, name) for name in names if name in inspect.signature(function).parameters}


@functools.cache
def expected(case: Case) -> list[np.ndarray]:
    """The result and both gradients, in fp64, a group at a time on the host."""
    x, weight, sizes = case.arrays()
    x, weight, grad = (a.astype(np.float64) for a in (x, weight, case.cotangent()))
    out, grad_x, grad_weight = np.zeros_like(grad), np.zeros_like(x), np.zeros_like(weight)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        out[rows] = x[rows] @ weight[group].T
        grad_x[rows] = grad[rows] @ weight[group]
        grad_weight[group] = grad[rows].T @ x[rows]
        start += size
    return [out, grad_x, grad_weight]


def computed(case: Case, function: Callable[..., Any]) -> list[jax.Array]:
    call = functools.partial(function, **options(case, function))

    @jax.jit
    def both(x: Any, weight: Any, sizes: Any, grad: Any) -> Any:
        out, vjp = jax.vjp(lambda x, weight: call(x, weight, sizes), x, weight)
        return out, *vjp(grad)

    arguments = (*map(jnp.asarray, case.arrays()), jnp.asarray(case.cotangent()))
    return list(both.lower(*arguments).compile(QUICKLY)(*arguments))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PARAMETERS)
def test_values_and_gradients_are_the_definitions(case: Case, name: str) -> None:
    got, want = computed(case, IMPLEMENTATIONS[name]), expected(case)
    assert [g.dtype for g in got] == [case.dtype] * 3
    for value, right in zip(got, want, strict=True):
        error = np.linalg.norm(np.asarray(value).astype(np.float64) - right)
        assert error <= TOLERANCE[case.dtype] * np.linalg.norm(right)
    for value in got[:2]:
        assert not np.any(np.asarray(value[sum(case.group_sizes) :]))
    for group, size in enumerate(case.group_sizes):
        assert size or not np.any(np.asarray(got[2][group]))


@pytest.mark.parametrize("case", PARAMETERS)
def test_the_reference_is_the_definition(case: Case) -> None:
    x, weight, sizes = case.arrays()
    x[sum(case.group_sizes) :] = 0  # autograd gives a NaN's row a part, even where it is dropped
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, weight)]
    out = reference.grouped_matmul(leaves[0], leaves[1], torch.from_numpy(sizes))
    grads = torch.autograd.grad(out, leaves, torch.from_numpy(case.cotangent().astype(np.float64)))
    for value, right in zip((out, *grads), expected(case), strict=True):
        np.testing.assert_allclose(value.detach().numpy(), right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_other_group_sizes_compile_nothing_new(name: str) -> None:
    call: Any = jax.jit(functools.partial(IMPLEMENTATIONS[name], block_rows=16))
    x, weight = jnp.ones((64, 32)), jnp.ones((4, 48, 32))
    for sizes in ((16, 16, 16, 16), (0, 60, 4, 0), (1, 2, 3, 4)):
        out = call(x, weight, jnp.array(sizes, jnp.int32))
        assert float(out.sum()) == sum(sizes) * 32 * 48
    assert call._cache_size() == 1


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_backward_saves_its_arguments_and_runs_no_forward(name: str) -> None:
    x, weight, sizes = jnp.ones((64, 32)), jnp.ones((4, 48, 32)), jnp.full(4, 16, jnp.int32)
    out, vjp = jax.vjp(lambda x, weight: IMPLEMENTATIONS[name](x, weight, sizes), x, weight)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(vjp)) == [(4,), (4, 48, 32), (64, 32)]
    text = str(jax.make_jaxpr(vjp)(out))
    assert text.count("pallas_call[") == (2 if name == "pallas" else 0)
    assert text.count("while[") >= (2 if name == "ragged" else 0)


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"block_rows": 24}, "block_rows=24 is not a positive multiple of 16; use one"),
        ({"block_rows": 128}, "block_rows=128 is larger than the rows of 64; use at most 64"),
        (
            {"block_in": 100},
            "block_in=100 is not a positive multiple of 128; use one, or 200, the whole weight's input",
        ),
        ({"block_out": 0}, "block_out=0 is not a positive multiple of 128; use one, or 384, the whole weight's output"),
        ({"block_out": 512}, "block_out=512 is larger than the weight's output width of 384; use at most 384"),
    ],
)
def test_block_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    (found,) = limits.check_grouped_matmul(in_width=200, out_width=384, num_rows=64, **sizes)
    assert message in found
    with pytest.raises(ValueError, match=f"grouped_matmul: {message}"):
        pallas.grouped_matmul(jnp.ones((64, 200)), jnp.ones((2, 384, 200)), jnp.ones(2, jnp.int32), **sizes)


def test_all_that_is_refused_is_said_at_once() -> None:
    assert len(limits.check_grouped_matmul(in_width=200, out_width=384, block_rows=8, block_in=8, block_out=8)) == 3
    (found,) = limits.check_grouped_matmul(in_width=4096, out_width=4096, block_in=2048, block_out=2048)
    assert "blocks of 512 x 2048 x 2048 (rows, in, out) need 40.0 MiB of VMEM; 16 MiB are there" in found
    (found,) = limits.check_grouped_matmul(in_width=256, out_width=256, num_rows=2**16, block_rows=16)
    assert "block_rows=16 makes 4096 blocks of 65536 rows; at most 2048 are counted right; use at least 32" in found


def test_the_chosen_sizes_are_not_refused() -> None:
    for itemsize in (2, 4):
        for rows, wide, narrow in ((8192 * 8, 4096, 1536), (2**20, 2048, 768), (7, 40, 5), (4096, 6144, 16384)):
            assert limits.check_grouped_matmul(in_width=wide, out_width=narrow, num_rows=rows, itemsize=itemsize) == []
            assert limits.check_grouped_matmul(in_width=narrow, out_width=wide, num_rows=rows, itemsize=itemsize) == []
    assert limits.width_block(1536, 2) == 768


def test_other_mistakes_are_refused() -> None:
    x, sizes = jnp.ones((64, 256)), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="x is float32 and weight bfloat16; cast one of them"):
        pallas.grouped_matmul(x, jnp.ones((2, 256, 256), jnp.bfloat16), sizes)
    with pytest.raises(ValueError, match="block_rows=-1 is not positive; use at least 1"):
        ragged.grouped_matmul(x, jnp.ones((2, 256, 256)), sizes, block_rows=-1)


def test_the_limits_do_without_jax() -> None:
    code = "import sys; sys.modules['jax'] = None; from tpu_train.kernels.moe import limits, cases"
    subprocess.run([sys.executable, "-c", code], check=True)
