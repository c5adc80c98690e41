"""Values and gradients of the fused projection and loss against fp64, and what is refused."""

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

from tpu_train.kernels.loss import blockwise, limits, pallas, reference
from tpu_train.kernels.loss.cases import CASES, Case

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "pallas": functools.partial(pallas.linear_logsumexp, interpret=True),
    "blockwise": blockwise.linear_logsumexp,
}
# Most of the time goes into compiling what the interpreter makes of a kernel.
QUICKLY: dict[str, Any] = {"xla_backend_optimization_level": 0}
TOLERANCE = {"float32": 1e-5, "bfloat16": 1.6e-2}
PARAMETERS = [
    pytest.param(case, id=case.name, marks=[pytest.mark.full] * case.full)
    for case in CASES
    if case.num_columns != 0  # autograd's gradient of an empty log-sum-exp is NaN; that case has its own test
]


def options(case: Case, function: Callable[..., Any]) -> dict[str, Any]:
    names = ("soft_cap", "block_rows", "block_columns", "block_depth", "chunk_columns")
    return {name: getattr(case, name) for name in names if name in inspect.signature(function).parameters}


@functools.cache
def expected(case: Case) -> list[np.ndarray]:
    """Both vectors and both gradients, in fp64."""
    x, weight, labels = case.arrays()
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, weight)]
    count = None if case.num_columns is None else torch.tensor(case.num_columns)
    labels = torch.from_numpy(labels)
    vectors = reference.linear_logsumexp(leaves[0], leaves[1], labels, count, soft_cap=case.soft_cap)
    assert vectors[0].dtype == torch.float64
    grads = torch.autograd.grad(vectors, leaves, [torch.from_numpy(g).double() for g in case.cotangents()])
    return [t.detach().numpy() for t in (*vectors, *grads)]


def computed(case: Case, function: Callable[..., Any]) -> list[jax.Array]:
    call = functools.partial(function, **options(case, function))
    count = None if case.num_columns is None else jnp.int32(case.num_columns)

    @jax.jit
    def both(x: Any, weight: Any, labels: Any, count: Any, grads: Any) -> Any:
        vectors, vjp = jax.vjp(lambda x, weight: call(x, weight, labels, count), x, weight)
        return *vectors, *vjp(grads)

    arguments = (*map(jnp.asarray, case.arrays()), count, tuple(map(jnp.asarray, case.cotangents())))
    return list(both.lower(*arguments).compile(QUICKLY)(*arguments))


def assert_close(got: Any, want: np.ndarray, tolerance: float) -> None:
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape
    infinite = ~np.isfinite(want)
    np.testing.assert_array_equal(got[infinite], want[infinite])
    error = np.linalg.norm(got[~infinite] - want[~infinite])
    assert error <= tolerance * np.linalg.norm(want[~infinite])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", PARAMETERS)
def test_values_and_gradients_are_the_definitions(case: Case, name: str) -> None:
    got = computed(case, IMPLEMENTATIONS[name])
    assert [g.dtype for g in got] == ["float32", "float32", case.dtype, case.dtype]
    for value, want in zip(got, expected(case), strict=True):
        assert_close(value, want, TOLERANCE[case.dtype])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_shard_of_padding_gives_nothing(name: str) -> None:
    (case,) = (case for case in CASES if case.num_columns == 0)
    logsumexp, picked, *grads = computed(case, IMPLEMENTATIONS[name])
    assert jnp.isneginf(logsumexp).all()
    assert all(not jnp.any(value) for value in (picked, *grads))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_vocabulary_shards_combine_to_the_whole(name: str) -> None:
    """Two shards and a padded third, each with labels counted from its own first row, and the loss over them."""
    case, size = Case("", 37, 40, 509), 170
    x, weight, labels = map(jnp.asarray, case.arrays())
    valid = (labels >= 0) & (labels < 509)

    def whole_loss(x: Any, weight: Any) -> Any:
        shards = jnp.pad(weight, ((0, 1), (0, 0))).reshape(3, size, -1)
        parts = []
        for i, shard in enumerate(shards):
            count = jnp.int32(min(size, 509 - i * size))
            parts.append(IMPLEMENTATIONS[name](x, shard, labels - i * size, count))
        logsumexp = jax.nn.logsumexp(jnp.stack([part[0] for part in parts]), axis=0)
        loss = logsumexp - sum(part[1] for part in parts) + 1e-2 * logsumexp**2
        return jnp.where(valid, loss, 0).sum()

    loss, grads = jax.jit(jax.value_and_grad(whole_loss, argnums=(0, 1)))(x, weight)
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in case.arrays()[:2]]
    logits = leaves[0] @ leaves[1].T
    ignored = torch.from_numpy(np.where(valid, labels, -100)).long()
    want = torch.nn.functional.cross_entropy(logits, ignored, reduction="sum", ignore_index=-100)
    want = want + 1e-2 * (logits.logsumexp(1) ** 2)[ignored != -100].sum()
    np.testing.assert_allclose(loss, want.item(), rtol=1e-5)
    for got, leaf in zip(grads, torch.autograd.grad(want, leaves), strict=True):
        assert_close(got, leaf.numpy(), 1e-5)


def test_the_reference_and_its_loss_are_pytorchs_cross_entropy() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(20, 8, dtype=torch.float64), torch.randn(30, 8, dtype=torch.float64)
    labels = torch.randint(0, 30, (20,))
    labels[::3] = -100
    shards = [
        reference.linear_logsumexp(x, part, labels - first) for first, part in ((0, weight[:13]), (13, weight[13:]))
    ]
    vectors = reference.combine_shards(torch.stack([s[0] for s in shards]), torch.stack([s[1] for s in shards]))
    loss = reference.cross_entropy_sum(*vectors, labels >= 0)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x @ weight.T, labels, reduction="sum"))
    squares = ((x @ weight.T).logsumexp(1) ** 2)[labels >= 0].sum()
    torch.testing.assert_close(reference.cross_entropy_sum(*vectors, labels >= 0, z_loss=0.1), loss + 0.1 * squares)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_backward_makes_the_logits_once_and_saves_only_vectors(name: str) -> None:
    case = Case("", 32, 16, 512, chunk_columns=128, block_columns=128)
    x, weight, labels = map(jnp.asarray, case.arrays())
    call = functools.partial(IMPLEMENTATIONS[name], **options(case, IMPLEMENTATIONS[name]))
    _, vjp = jax.vjp(lambda x, weight: call(x, weight, labels), x, weight)
    saved = [leaf.shape for leaf in jax.tree.leaves(vjp)]
    assert sorted(saved) == [(32,), (32,), (32, 16), (512, 16)]
    if name == "pallas":
        text = str(jax.make_jaxpr(vjp)((jnp.ones(32), jnp.ones(32))))
        assert text.count("pallas_call[") == 1
        assert "32,512]" not in text


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"block_rows": 24}, "block_rows=24 is not a positive multiple of 16"),
        ({"block_rows": 0}, "block_rows=0 is not a positive multiple of 16"),
        ({"block_columns": 100}, "block_columns=100 is not a positive multiple of 128; use one, or 509, the whole"),
        ({"block_columns": 640}, "block_columns=640 is larger than the vocabulary of 509; use at most 509"),
        ({"block_depth": 64}, "block_depth=64 is not a positive multiple of 128; use one, or 200, the whole model"),
        ({"block_depth": 256}, "block_depth=256 is larger than the model width of 200"),
    ],
)  # fmt: skip
def test_block_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], message: str) -> None:
    (found,) = limits.check_linear_logsumexp(depth=200, vocabulary=509, num_rows=64, **sizes)
    assert message in found
    with pytest.raises(ValueError, match=f"linear_logsumexp: {message}"):
        pallas.linear_logsumexp(jnp.ones((64, 200)), jnp.ones((509, 200)), jnp.zeros(64, jnp.int32), **sizes)


def test_all_that_is_refused_is_said_at_once() -> None:
    found = limits.check_linear_logsumexp(depth=200, vocabulary=509, num_rows=64, block_rows=128, block_depth=512)
    assert len(found) == 2
    (found,) = limits.check_linear_logsumexp(depth=8192, vocabulary=128_256, block_rows=4096, block_columns=4096)
    assert "blocks of 4096 x 4096 x 512 (rows, columns, depth) need" in found


def test_the_chosen_sizes_are_not_refused() -> None:
    for itemsize in (2, 4):
        for depth, vocabulary in ((4096, 151_936), (40, 509), (16384, 128_256)):
            assert limits.check_linear_logsumexp(depth=depth, vocabulary=vocabulary, itemsize=itemsize) == []


def test_other_mistakes_are_refused() -> None:
    x, labels = jnp.ones((64, 256)), jnp.zeros(64, jnp.int32)
    with pytest.raises(ValueError, match="x is float32 and weight bfloat16; cast one of them"):
        pallas.linear_logsumexp(x, jnp.ones((512, 256), jnp.bfloat16), labels)
    with pytest.raises(ValueError, match="chunk_columns=192 is no multiple of the block's 128 columns"):
        pallas.linear_logsumexp(x, jnp.ones((512, 256)), labels, block_columns=128, chunk_columns=192)


def test_the_limits_do_without_jax() -> None:
    code = "import sys; sys.modules['jax'] = None; from tpu_train.kernels.loss import limits, cases"
    subprocess.run([sys.executable, "-c", code], check=True)
