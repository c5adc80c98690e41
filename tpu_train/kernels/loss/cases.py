"""The shared cases of the fused projection and loss: sizes, options and made-up inputs."""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: what is special about it.
        num_rows: R.
        depth: D.
        vocabulary: V, padding included.
        dtype: of `x` and `weight`.
        soft_cap: of the logits.
        num_columns: how many of the vocabulary's rows exist; None is all.
        labels: `mixed` has ignored and foreign labels among valid ones.
        block_rows: for the implementations that have it, small enough that there are several; likewise the others.
        block_columns: a block's part of the vocabulary.
        block_depth: a block's part of D.
        chunk_columns: of the backward.
        full: takes long under the Pallas interpreter.
    """

    name: str
    num_rows: int
    depth: int
    vocabulary: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    soft_cap: float | None = None
    num_columns: int | None = None
    labels: Literal["valid", "mixed", "ignored"] = "mixed"
    block_rows: int | None = None
    block_columns: int | None = None
    block_depth: int | None = None
    chunk_columns: int | None = None
    full: bool = False

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`x`, `weight` and `labels`, the same each time; logits have a standard deviation of 2."""
        random = np.random.default_rng(0)
        dtype = np.float32 if self.dtype == "float32" else ml_dtypes.bfloat16
        x = random.standard_normal((self.num_rows, self.depth)).astype(dtype)
        weight = (random.standard_normal((self.vocabulary, self.depth)) * 2 / self.depth**0.5).astype(dtype)
        labels = random.integers(0, self.num_columns or self.vocabulary, self.num_rows).astype(np.int32)
        if self.labels == "ignored":
            labels[:] = -100
        if self.labels == "mixed":
            labels[::3] = -100
            labels[1::5] = self.vocabulary
            labels[2::7] = 2**31 - 1
        return x, weight, labels

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        """Of `logsumexp` and `picked`: fp32, unlike each other, some zero."""
        random = np.random.default_rng(1)
        grads = random.standard_normal((2, self.num_rows)).astype(np.float32)
        grads[:, ::4] = 0
        return grads[0], grads[1]


CASES = (
    Case("small", 24, 32, 64),
    Case("small_bf16", 24, 32, 64, "bfloat16"),
    Case("odd_sizes", 37, 40, 509),
    Case("odd_sizes_in_blocks", 53, 200, 509, block_rows=16, block_columns=128, block_depth=128, chunk_columns=256),
    Case(
        "odd_sizes_in_blocks_bf16", 53, 200, 509, "bfloat16",
        block_rows=16, block_columns=128, block_depth=128, chunk_columns=256,
    ),
    Case("soft_cap", 37, 40, 509, soft_cap=3.0, block_rows=16, block_columns=256, chunk_columns=256),
    Case("soft_cap_bf16", 37, 40, 509, "bfloat16", soft_cap=3.0, block_rows=16, block_columns=256),
    Case("strips", 256, 32, 300, block_rows=128, block_columns=128),
    Case("all_ignored", 37, 40, 509, labels="ignored"),
    Case("all_valid", 37, 40, 509, labels="valid"),
    Case("one_row", 1, 16, 130, labels="valid"),
    Case("padded", 37, 40, 512, num_columns=509, block_columns=128, chunk_columns=128),
    Case("whole_blocks_of_padding", 37, 40, 512, num_columns=100, block_columns=128, chunk_columns=128, soft_cap=5.0),
    Case("nothing_but_padding", 37, 40, 256, num_columns=0, block_columns=128),
    Case("large_vocabulary", 19, 16, 151_936),
    Case("large_vocabulary_bf16", 19, 16, 151_936, "bfloat16", soft_cap=30.0),
    Case("many_rows", 1061, 256, 5003, full=True),
    Case("many_rows_bf16", 1061, 256, 5003, "bfloat16", full=True),
)  # fmt: skip
