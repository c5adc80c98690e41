"""The fused projection and loss at Qwen3's sizes, by the real TPU compiler."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tpu_train.kernels.loss.pallas import linear_logsumexp
from tpu_train.planning.topology import tpu_devices

# As many rows as the weight is wide would make logits and weight look alike.
ROWS, WIDTH, VOCABULARY = 4096, 4096, 151_936


def compiled(topology: str, rows: int, width: int, vocabulary: int, dtype: Any = jnp.bfloat16, **options: Any) -> Any:
    """Forward and backward."""
    device = SingleDeviceSharding(tpu_devices(topology)[0])

    def struct(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=device)

    def both(x: Any, weight: Any, labels: Any, count: Any, grads: Any) -> Any:
        vectors, vjp = jax.vjp(lambda x, weight: linear_logsumexp(x, weight, labels, count, **options), x, weight)
        return *vectors, *vjp(grads)

    vector = struct(jnp.float32, rows)
    arguments = (
        struct(dtype, rows, width),
        struct(dtype, vocabulary, width),
        struct(jnp.int32, rows),
        struct(jnp.int32),
    )
    return jax.jit(both).lower(*arguments, (vector, vector)).compile()


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
def test_no_logits_and_no_copy_of_the_weight_are_in_memory(topology: str) -> None:
    program = compiled(topology, ROWS, WIDTH, VOCABULARY)
    text = program.as_text()
    # The forward, and the gradient of a chunk of the logits: one in the loop, one for the rest.
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    assert f"[{ROWS},{VOCABULARY}]" not in text
    made = re.findall(rf"^ *(?:ROOT )?%\S+ = \w+\[{VOCABULARY},{WIDTH}\]\S* ([\w-]+)\(", text, re.MULTILINE)
    assert not {"copy", "transpose", "broadcast", "pad", "concatenate"} & set(made)
    # A chunk of the logits' gradient (128 MiB), and the fp32 gradient of x (64 MiB) with its bf16 result and vectors.
    assert program.memory_analysis().temp_size_in_bytes <= 280 * 2**20 < ROWS * VOCABULARY * 2 / 4


@pytest.mark.parametrize(
    "rows, width, vocabulary, dtype, options",
    [
        (37, 40, 509, "bfloat16", {}),
        (37, 40, 509, "float32", {"soft_cap": 30.0}),
        (53, 200, 1509, "float32", {"block_rows": 16, "block_columns": 128, "block_depth": 128, "chunk_columns": 256}),
        (1000, 1000, 12_001, "bfloat16", {"soft_cap": 30.0, "block_columns": 512}),
        (4096, 8192, 16_032, "float32", {}),
    ],
)
def test_other_sizes_compile(rows: int, width: int, vocabulary: int, dtype: str, options: dict[str, Any]) -> None:
    text = compiled("v5p:2x2x1", rows, width, vocabulary, jnp.dtype(dtype), **options).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') >= 2
