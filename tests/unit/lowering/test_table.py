"""The joined table, and the arguments its entries refuse."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import Array

from tpu_train.lowering import context, table
from tpu_train.lowering.table import TABLE

aten = torch.ops.aten


def test_an_op_in_two_families_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"aten.add.Tensor has two entries in the table"):
        table._join({aten.add.Tensor: jnp.add}, {aten.mul.Tensor: jnp.multiply}, {aten.add.Tensor: jnp.add})


def _query(heads: int) -> Array:
    return jnp.ones((1, heads, 3, 8))


MASK = jnp.array([[True, False], [False, True]])
SQUARE = jnp.ones((2, 2))

REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    (
        "attention with dropout",
        lambda: TABLE[aten._scaled_dot_product_flash_attention_for_cpu.default](*[_query(2)] * 3, 0.1),
        r"flash_attention_for_cpu with dropout_p=0.1: allowed is dropout_p=0",
    ),
    (
        "attention with heads that do not divide",
        lambda: TABLE[aten._scaled_dot_product_flash_attention_for_cpu.default](_query(4), _query(3), _query(3)),
        r"with 4 query heads and 3 key/value heads: the query heads must be a multiple",
    ),
    (
        "embedding gradient scaled by frequency",
        lambda: TABLE[aten.embedding_dense_backward.default](jnp.ones((2, 4)), jnp.array([0, 1]), 3, -1, True),
        r"aten::embedding_dense_backward with scale_grad_by_freq=True: allowed is False",
    ),
    (
        "scatter_reduce mean",
        lambda: TABLE[aten.scatter_reduce.two](SQUARE, 0, jnp.zeros((2, 2), jnp.int32), SQUARE, "mean"),
        r"aten::scatter_reduce.two with reduce='mean': allowed are sum, prod, amax, amin",
    ),
    (
        "reading at a mask",
        lambda: TABLE[aten.index.Tensor](SQUARE, [MASK]),
        r"aten::index.Tensor with a boolean mask: .* use torch.where",
    ),
    (
        "writing a value per masked element",
        lambda: TABLE[aten.index_put.default](SQUARE, [MASK], jnp.ones((2,))),
        r"aten::index_put with a boolean mask and values per masked element: .* use torch.where",
    ),
    (
        "writing at a mask and an index",
        lambda: TABLE[aten.index_put.default](SQUARE, [jnp.array([True, False]), jnp.array([0])], jnp.ones(())),
        r"aten::index_put with a boolean mask and values per masked element: .* use torch.where",
    ),
    (
        "batch norm that updates statistics",
        lambda: TABLE[aten.native_batch_norm.default](
            SQUARE, None, None, jnp.zeros(2), jnp.ones(2), True, momentum=0.1, eps=1e-5
        ),
        r"aten::native_batch_norm in training with running statistics.*: allowed are track_running_stats=False",
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_entries_refuse_what_they_would_get_wrong(case: tuple[str, Callable[[], Any], str]) -> None:
    _, run, message = case
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(("precision", "expected"), [("default", "DEFAULT"), ("high", "HIGH"), ("highest", "HIGHEST")])
@pytest.mark.parametrize("op", [aten.mm.default, aten.bmm.default, aten.convolution.default])
def test_products_take_the_precision_of_the_context(op: Any, precision: Any, expected: str) -> None:
    x = jnp.ones((2, 2)) if op is aten.mm.default else jnp.ones((2, 2, 2))
    options = ([1], [0], [1], False, [0], 1) if op is aten.convolution.default else ()
    arguments = (x, x, None, *options) if options else (x, x)
    with context.use(context.LoweringContext(matmul_precision=precision)):
        program = jax.jit(lambda: TABLE[op](*arguments)).lower().as_text()
    assert set(re.findall(r"\b(?:DEFAULT|HIGH|HIGHEST)\b", program)) | {"DEFAULT"} == {expected, "DEFAULT"}


def test_grouped_query_attention_repeats_no_keys_or_values() -> None:
    query, key = jnp.ones((1, 8, 16, 4)), jnp.ones((1, 2, 32, 4))
    attention = TABLE[aten._scaled_dot_product_flash_attention_for_cpu.default]
    program = jax.jit(attention, static_argnums=(3, 4)).lower(query, key, key, 0.0, True).as_text()
    assert "1x8x32x4" not in program
    assert "1x2x4x32x4" not in program


def test_a_linear_layer_is_one_product_without_conversions() -> None:
    def linear(x: Array, weight: Array) -> Array:
        return TABLE[aten.mm.default](x, TABLE[aten.t.default](weight))

    program = jax.jit(linear).lower(jnp.ones((3, 4)), jnp.ones((5, 4))).compile().as_text()
    assert program is not None
    assert program.count(" dot(") == 1
    assert " transpose(" not in program


@pytest.mark.parametrize("op", [aten._softmax.default, aten._log_softmax.default])
def test_a_float32_softmax_converts_nothing(op: Any) -> None:
    assert "convert" not in jax.jit(lambda x: TABLE[op](x, -1, False)).lower(jnp.ones((3, 4))).as_text()


def test_an_embedding_gradient_is_one_scatter() -> None:
    def gradient(grad: Array, indices: Array) -> Array:
        return TABLE[aten.embedding_dense_backward.default](grad, indices, 10, -1, False)

    program = jax.jit(gradient).lower(jnp.ones((6, 4)), jnp.zeros((6,), jnp.int32)).as_text()
    assert program.count('"stablehlo.scatter"(') == 1
    assert "convert" not in program
    assert "select" not in program
