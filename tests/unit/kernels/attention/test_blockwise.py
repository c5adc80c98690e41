"""Attention by blocks: values and gradients as defined, at every case; memory that does not grow with S x S."""

import jax
import jax.numpy as jnp
import pytest

from tests.unit.kernels.attention.comparison import (
    assert_a_window_of_one_gives_the_own_value,
    assert_as_defined,
    assert_documents_stand_alone,
    assert_nothing_leaks,
)
from tpu_train.kernels.attention.blockwise import blockwise_attention
from tpu_train.kernels.attention.cases import LARGE, LONG, SMALL, Case
from tpu_train.kernels.attention.limits import check_blockwise

PACKED = Case(384, 4, 2, 64, documents=((133, 251),))


@pytest.mark.parametrize("case", [*SMALL, *LARGE], ids=str)
def test_values_and_gradients_are_as_defined(case: Case) -> None:
    assert_as_defined(blockwise_attention, case)


@pytest.mark.full
@pytest.mark.parametrize("case", LONG, ids=str)
def test_values_and_gradients_of_long_sequences_are_as_defined(case: Case) -> None:
    assert_as_defined(blockwise_attention, case)


@pytest.mark.parametrize("blocks", [(1, 7), (100, 48), (128, 1000)])
def test_any_block_sizes_give_the_same(blocks: tuple[int, int]) -> None:
    case = Case(256, 4, 2, 64, documents=((100, 156),), window=70)
    assert_as_defined(blockwise_attention, case, block_q=blocks[0], block_kv=blocks[1])


def test_a_sequence_need_not_be_whole_blocks() -> None:
    assert_as_defined(blockwise_attention, Case(131, 4, 2, 20, documents=((30, 101),)), block_q=64, block_kv=48)


def test_a_window_of_one_gives_the_own_value() -> None:
    assert_a_window_of_one_gives_the_own_value(blockwise_attention)


def test_packed_documents_stand_alone() -> None:
    assert_documents_stand_alone(blockwise_attention, PACKED, block_q=64, block_kv=128)


def test_nothing_leaks_between_documents() -> None:
    assert_nothing_leaks(blockwise_attention, PACKED, block_q=64, block_kv=128)


def test_memory_grows_with_the_sequence_and_not_with_its_square() -> None:
    def temporary_bytes(seq_len: int) -> int:
        query, key = (jax.ShapeDtypeStruct((1, heads, seq_len, 64), jnp.float32) for heads in (8, 2))

        def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return blockwise_attention(query, key, value, None, None).sum()

        memory = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, key).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes(8192) < 4.2 * temporary_bytes(2048)


@pytest.mark.parametrize(
    "shapes, options, problem",
    [
        (((4, 64), (4, 64), (4, 64)), {}, r"query, key and value have 2, 2 and 2 dimensions; allowed is 4 each"),
        (((1, 4, 8, 64), (1, 3, 8, 64), (1, 3, 8, 64)), {}, r"3 key heads do not divide 4 query heads; .* 1, 2, 4"),
        (((1, 4, 8, 64), (1, 4, 9, 64), (1, 4, 9, 64)), {}, r"queries and keys are the same tokens"),
        (((1, 4, 8, 64), (1, 4, 8, 64), (1, 2, 8, 64)), {}, r"key \[1, 4, 8, 64\] and value \[1, 2, 8, 64\] differ"),
        (((1, 4, 8, 64),) * 3, {"window": 0}, r"window=0 lets a query see nothing; use at least 1"),
        (((1, 4, 8, 64),) * 3, {"block_q": 0, "block_kv": -1}, r"block_q=0 holds no token.*\n.*block_kv=-1 holds no"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(shapes: tuple[tuple[int, ...], ...], options: dict[str, int], problem: str) -> None:
    query, key, value = (jnp.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=problem):
        blockwise_attention(query, key, value, None, None, **options)


def test_segment_ids_of_another_shape_or_of_one_side_are_refused() -> None:
    x, ids = jnp.zeros((1, 4, 8, 64)), jnp.zeros((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="segment ids of queries and keys are given together"):
        blockwise_attention(x, x, x, ids, None)
    with pytest.raises(ValueError, match=r"query_segment_ids \[1, 4\] is not \[B, S\] = \[1, 8\]"):
        blockwise_attention(x, x, x, ids[:, :4], ids)


def test_the_check_finds_what_the_function_raises() -> None:
    assert check_blockwise(window=1, block_q=1, block_kv=1) == []
    assert check_blockwise(block_q=0) == ["block_q=0 holds no token; use at least 1"]
