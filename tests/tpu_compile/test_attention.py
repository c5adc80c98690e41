"""Splash attention with its derivative, by the real TPU compiler: how many kernels, which operands, how much memory."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tpu_train.kernels.attention.splash import splash_attention
from tpu_train.planning.topology import tpu_devices

TOPOLOGIES = ["v5p:2x2x1", "v6e:2x2"]
NUM_HEADS, NUM_KV_HEADS = 32, 8
KERNEL = 'custom_call_target="tpu_custom_call"'


def compiled(topology: str, seq_len: int, *, head_dim: int = 128, packed: bool = True, **options: Any) -> Any:
    """Result and gradients of one sequence in bf16, compiled for one device."""
    sharding = jax.sharding.SingleDeviceSharding(tpu_devices(topology)[0])

    def heads(count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, count, seq_len, head_dim), jnp.bfloat16, sharding=sharding)

    def step(query: Any, key: Any, value: Any, out_grad: Any, ids: Any) -> Any:
        out, vjp = jax.vjp(lambda q, k, v: splash_attention(q, k, v, ids, ids, **options), query, key, value)
        return out, vjp(out_grad)

    ids = jax.ShapeDtypeStruct((1, seq_len), jnp.int32, sharding=sharding) if packed else None
    query, key = heads(NUM_HEADS), heads(NUM_KV_HEADS)
    return jax.jit(step).lower(query, key, key, query, ids).compile()


@functools.cache
def hlo(topology: str, seq_len: int, **options: Any) -> str:
    return compiled(topology, seq_len, **options).as_text()


def kernel_calls(text: str) -> list[str]:
    return [line for line in text.splitlines() if KERNEL in line]


@pytest.mark.parametrize("seq_len", [4096, 32768])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_three_kernels_and_nothing_of_the_size_of_all_scores(topology: str, seq_len: int) -> None:
    program = compiled(topology, seq_len)
    text = program.as_text()
    calls = kernel_calls(text)
    assert len(calls) == 3
    # Key and value reach each kernel as they are, not once per query head.
    assert all(call.count(f"bf16[{NUM_KV_HEADS},{seq_len},128]") >= 2 for call in calls)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\w\[(\d+(?:,\d+)*)\]", text)}
    assert (NUM_HEADS, seq_len, 128) in shapes
    assert not [shape for shape in shapes if shape.count(seq_len) > 1]
    # The largest is of query's size; so are, in all, a few in fp32.
    query_elements = NUM_HEADS * seq_len * 128
    assert max(map(math.prod, shapes)) <= 2 * query_elements
    assert program.memory_analysis().temp_size_in_bytes < 3 * 4 * query_elements


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_fused_backward_is_one_kernel(topology: str) -> None:
    assert len(kernel_calls(hlo(topology, 4096, fused_backward=True))) == 2


def test_a_window_makes_the_kernels_grid_shorter() -> None:
    whole, text = (hlo("v6e:2x2", 4096, window=window) for window in (None, 1000))
    assert len(kernel_calls(text)) == 3
    # Which key blocks to visit, by query block: 512 queries see 1511 tokens, which two blocks of 1024 hold here.
    assert "s8[1,8,4]" in kernel_calls(whole)[0]
    assert "s8[1,8,2]" in kernel_calls(text)[0]


@pytest.mark.parametrize("head_dim", [48, 64, 256])
def test_other_head_sizes_compile_as_they_are(head_dim: int) -> None:
    calls = kernel_calls(hlo("v5p:2x2x1", 1024, head_dim=head_dim, packed=False))
    assert len(calls) == 3
    assert all(f"bf16[{NUM_KV_HEADS},1024,{head_dim}]" in call for call in calls)


@pytest.mark.parametrize(
    "option, kernel",
    [
        ("block_q", "fwd"),
        ("block_kv", "fwd"),
        ("block_kv_compute", "fwd"),
        ("block_q_dkv", "dkv"),
        ("block_kv_dkv", "dkv"),
        ("block_kv_dkv_compute", "dkv"),
        ("block_q_dq", "dq"),
        ("block_kv_dq", "dq"),
    ],
)
def test_each_block_size_changes_its_kernel_and_no_other(option: str, kernel: str) -> None:
    sizes = {"block_q": 256, "block_kv": 256, "block_kv_compute": 256, "block_q_dkv": 256, "block_kv_dkv": 256}
    # Others than the forward's: kernels of the same sizes share traces, and with them the places in a kernel's text.
    sizes |= {"block_kv_dkv_compute": 256, "block_q_dq": 512, "block_kv_dq": 512}
    changed = sizes | {option: sizes[option] // 2 if option.endswith("compute") else sizes[option] * 2}
    before, after = (_bodies(hlo("v6e:2x2", 1024, packed=False, **options)) for options in (sizes, changed))
    assert before.keys() == after.keys() == {"fwd", "dkv", "dq"}
    assert {name for name in before if before[name] != after[name]} == {kernel}


def _bodies(text: str) -> dict[str, str]:
    """The compiled kernels' code, by name; a call's configuration follows its first line."""
    names = [name for call in kernel_calls(text) for name in re.findall(r"%splash_mha_(fwd|dkv|dq)\w*[.\d]* =", call)]
    return dict(zip(names, re.findall(r'"custom_call_config":{"body":"([^"]+)"', text), strict=True))
