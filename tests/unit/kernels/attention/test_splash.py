"""Splash attention, its kernels interpreted: values and gradients as defined, and what it refuses."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.kernels.attention.comparison import (
    assert_a_window_of_one_gives_the_own_value,
    assert_as_defined,
    assert_documents_stand_alone,
    assert_nothing_leaks,
)
from tpu_train.kernels.attention.cases import SMALL, Case
from tpu_train.kernels.attention.limits import check_splash
from tpu_train.kernels.attention.splash import _CausalMask, splash_attention

BLOCKS: dict[str, Any] = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128, "interpret": True}
PACKED = Case(256, 4, 2, 64, documents=((128, 128),))


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_values_and_gradients_are_as_defined(case: Case) -> None:
    assert_as_defined(splash_attention, case, **BLOCKS)


@pytest.mark.parametrize(
    "options",
    [
        {"fused_backward": True},
        {"fused_backward": True, "block_kv_dkv": 256},
        {"block_kv": 256, "block_q_dkv": 256, "block_kv_dkv": 256, "block_q_dq": 256, "block_kv_dq": 256},
    ],
    ids=str,
)
def test_any_block_sizes_give_the_same(options: dict[str, Any]) -> None:
    case = Case(256, 4, 2, 64, documents=((100, 156),), window=70)
    assert_as_defined(splash_attention, case, **(BLOCKS | options))


def test_a_window_of_one_gives_the_own_value() -> None:
    assert_a_window_of_one_gives_the_own_value(splash_attention, **BLOCKS)


def test_packed_documents_stand_alone() -> None:
    assert_documents_stand_alone(splash_attention, PACKED, **BLOCKS)


@pytest.mark.parametrize("fused_backward", [False, True])
def test_nothing_leaks_between_documents(fused_backward: bool) -> None:
    assert_nothing_leaks(splash_attention, PACKED, fused_backward=fused_backward, **BLOCKS)


def test_residuals_are_the_inputs_the_result_and_one_number_per_query() -> None:
    query, key, value, _ = (jnp.asarray(x) for x in Case(256, 8, 2, 64).arrays())
    _, vjp = jax.vjp(lambda q, k, v: splash_attention(q, k, v, None, None, **BLOCKS), query, key, value)
    kept = sorted(x.shape for x in jax.tree.leaves(vjp))
    assert kept == sorted([query.shape, key.shape, value.shape, query.shape, query.shape[:3]])


@pytest.mark.parametrize("window", [None, 1, 5, 64, 100, 1000])
def test_the_mask_by_blocks_is_the_mask(window: int | None) -> None:
    age = np.arange(128)[:, None] - np.arange(128)
    whole = (age >= 0) & (age < (window or 128))
    mask = _CausalMask(128, window)
    for start in range(0, 128, 32):
        for key_start in range(0, 128, 16):
            block = (slice(start, start + 32), slice(key_start, key_start + 16))
            np.testing.assert_array_equal(np.broadcast_to(mask[block], (32, 16)), whole[block])


@pytest.mark.parametrize(
    "arguments, options",
    [
        ((1024, 128, 32, 8), {}),
        ((1024, 48, 4, 4), {"window": 1}),
        ((32768, 64, 8, 2), {"block_q": 2048, "block_kv": 2048, "block_kv_compute": 1024, "fused_backward": True}),
    ],
)
def test_the_check_finds_nothing_where_nothing_is_wrong(
    arguments: tuple[int, int, int, int], options: dict[str, Any]
) -> None:
    assert check_splash(*arguments, **options) == []


DIVIDE_1024 = "allowed are 128, 256, 512, 1024"
PROBLEMS: list[tuple[int, int, int, dict[str, Any], list[str]]] = [
    (1024, 64, 5, {}, ["5 key heads do not divide 32 query heads; allowed are 1, 2, 4, 8, 16, 32"]),
    (1024, 20, 8, {}, ["head_dim 20 is not a multiple of 8 up to 256; use another implementation"]),
    (1024, 264, 8, {}, ["head_dim 264 is not a multiple of 8 up to 256; use another implementation"]),
    (1000, 64, 8, {}, ["sequence length 1000 is not a multiple of 128; the next is 1024"]),
    (1024, 64, 8, {"block_q": 384}, [f"block_q=384 does not divide the sequence length 1024; {DIVIDE_1024}"]),
    (1024, 64, 8, {"block_q": 64}, [f"block_q=64 is not a multiple of 128; {DIVIDE_1024}"]),
    (512, 64, 8, {}, ["block_kv=1024 is larger than the sequence length 512; allowed are 128, 256, 512"]),
    (
        1024,
        64,
        8,
        {"block_kv": 256},
        ["block_kv_compute=512 is larger than the block_kv 256; allowed are 128, 256"],
    ),
    (
        1024,
        64,
        8,
        {"block_kv_dkv": 256},
        ["block_kv_dkv_compute=512 (from block_kv_compute) is larger than the block_kv_dkv 256; allowed are 128, 256"],
    ),
    (
        1024,
        64,
        8,
        {"block_q_dkv": 0, "block_kv_dq": 100},
        [
            f"block_q_dkv=0 is not a multiple of 128; {DIVIDE_1024}",
            f"block_kv_dq=100 is not a multiple of 128; {DIVIDE_1024}",
        ],
    ),
    (
        1024,
        64,
        8,
        {"fused_backward": True, "block_q_dq": 128},
        ["block_q_dq=128 is of the dq kernel, which fused_backward=true replaces; leave it out"],
    ),
    (
        1024,
        64,
        8,
        {"window": 0},
        ["window=0 lets a query see nothing; use at least 1 (the token itself), or None for all earlier"],
    ),
]


@pytest.mark.parametrize("seq_len, head_dim, num_kv_heads, options, problems", PROBLEMS)
def test_the_check_finds_what_it_cannot_take(
    seq_len: int, head_dim: int, num_kv_heads: int, options: dict[str, Any], problems: list[str]
) -> None:
    assert check_splash(seq_len, head_dim, 32, num_kv_heads, **options) == problems


def test_the_function_raises_all_that_the_check_finds() -> None:
    query, key = jnp.zeros((1, 4, 512, 20)), jnp.zeros((1, 2, 512, 20))
    expected = r"(?s)splash attention: head_dim 20 is not.*\nblock_kv=1024 is larger than the sequence length 512"
    with pytest.raises(ValueError, match=expected):
        splash_attention(query, key, key, None, None)
    with pytest.raises(ValueError, match=r"splash attention: key .* does not go with query"):
        splash_attention(query, key[:, :, :256], key[:, :, :256], None, None)


def test_the_check_needs_no_jax() -> None:
    code = "import sys; import tpu_train.kernels.attention.limits; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_a_tpu_it_is_refused_unless_interpreted() -> None:
    x = jnp.zeros((1, 2, 128, 64))
    options = BLOCKS | {"interpret": False}
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU backend"):
        splash_attention(x, x, x, None, None, **options)
