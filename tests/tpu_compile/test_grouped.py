"""The grouped matmul's three products at Qwen3-235B's sizes, by the real TPU compiler."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tpu_train.kernels.moe.pallas import grouped_matmul
from tpu_train.planning.topology import tpu_devices

ROWS, EXPERTS, WIDTH, FEED_FORWARD = 8192 * 8, 128, 4096, 1536


def compiled(topology: str, rows: int, experts: int, in_width: int, out_width: int, dtype: Any = jnp.bfloat16) -> Any:
    """Forward and backward of one product."""
    device = SingleDeviceSharding(tpu_devices(topology)[0])

    def struct(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def both(x: Any, weight: Any, sizes: Any, grad: Any) -> Any:
        out, vjp = jax.vjp(lambda x, weight: grouped_matmul(x, weight, sizes), x, weight)
        return out, *vjp(grad)

    arguments = (
        struct(dtype, rows, in_width),
        struct(dtype, experts, out_width, in_width),
        struct(jnp.int32, experts),
        struct(dtype, rows, out_width),
    )
    return jax.jit(both).lower(*arguments).compile()


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("widths", [(WIDTH, FEED_FORWARD), (FEED_FORWARD, WIDTH)], ids=["up", "down"])
def test_all_three_products_are_kernels_without_copies(topology: str, widths: tuple[int, int]) -> None:
    program = compiled(topology, ROWS, EXPERTS, *widths)
    text = program.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert not re.search(r" (convolution|dot)\(", text)
    # The weight goes in, and its gradient comes out, as they are.
    weight = rf"\[{EXPERTS},({WIDTH},{FEED_FORWARD}|{FEED_FORWARD},{WIDTH})\]"
    made = re.findall(rf"= \w+{weight}\S* ([\w-]+)\(", text)
    assert {op for _, op in made} <= {"parameter", "custom-call", "get-tuple-element", "bitcast"}
    # What the kernels leave of rows of no group is masked into the two results of [T, ...], and that is all.
    assert program.memory_analysis().temp_size_in_bytes <= 1.1 * 2 * ROWS * (WIDTH + FEED_FORWARD)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(83, 5, 200, 136), (4100, 8, 1000, 1408)], ids=str)
def test_other_sizes_compile(sizes: tuple[int, int, int, int], dtype: str) -> None:
    text = compiled("v5p:2x2x1", *sizes, dtype=jnp.dtype(dtype)).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3
