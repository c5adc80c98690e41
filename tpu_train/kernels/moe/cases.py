"""The shared cases of the grouped matmul: sizes, group sizes, options and made-up inputs."""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        name: what is special about it.
        num_rows: T.
        in_width: of `x`.
        out_width: of the result.
        group_sizes: rows of each group; their sum may be less than T.
        dtype: of `x` and `weight`.
        block_rows: for the implementations that have it, small enough that there are several; likewise the others.
        block_in: a block's part of `in`.
        block_out: a block's part of `out`.
        full: takes long under the Pallas interpreter.
    """

    name: str
    num_rows: int
    in_width: int
    out_width: int
    group_sizes: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"] = "float32"
    block_rows: int | None = None
    block_in: int | None = None
    block_out: int | None = None
    full: bool = False

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`x`, `weight` and `group_sizes`, the same each time; rows of no group hold NaN, which must reach nothing."""
        random = np.random.default_rng(0)
        dtype = np.float32 if self.dtype == "float32" else ml_dtypes.bfloat16
        x = random.standard_normal((self.num_rows, self.in_width)).astype(dtype)
        x[sum(self.group_sizes) :] = np.nan
        shape = (len(self.group_sizes), self.out_width, self.in_width)
        weight = (random.standard_normal(shape) / self.in_width**0.5).astype(dtype)
        return x, weight, np.array(self.group_sizes, np.int32)

    def cotangent(self) -> np.ndarray:
        """Of the result, in its dtype."""
        shape = (self.num_rows, self.out_width)
        dtype = np.float32 if self.dtype == "float32" else ml_dtypes.bfloat16
        return np.random.default_rng(1).standard_normal(shape).astype(dtype)


CASES = (
    Case("even", 64, 32, 48, (16, 16, 16, 16)),
    Case("even_bf16", 64, 32, 48, (16, 16, 16, 16), "bfloat16"),
    Case("uneven_with_empty_groups", 96, 32, 48, (0, 5, 0, 0, 41, 1, 49, 0), block_rows=16),
    Case("uneven_with_empty_groups_bf16", 96, 32, 48, (0, 5, 0, 0, 41, 1, 49, 0), "bfloat16", block_rows=16),
    Case("one_group_has_all", 64, 32, 48, (0, 0, 64, 0), block_rows=16),
    Case("rows_of_no_group", 80, 32, 48, (7, 0, 20, 6), block_rows=16),
    Case("rows_of_no_group_bf16", 80, 32, 48, (7, 0, 20, 6), "bfloat16", block_rows=16),
    Case("no_row_of_any_group", 48, 32, 48, (0, 0, 0), block_rows=16),
    Case("odd_sizes", 83, 200, 136, (11, 0, 30, 1, 17, 24), block_rows=32, block_in=128, block_out=128),
    Case(
        "odd_sizes_bf16", 83, 200, 136, (11, 0, 30, 1, 17, 24), "bfloat16", block_rows=32, block_in=128, block_out=128
    ),
    Case("more_groups_than_rows", 5, 32, 48, (1, 0, 0, 2, 0, 0, 0, 1, 0, 0, 1, 0)),
    Case("one_row", 1, 32, 48, (0, 1)),
    Case("one_group", 40, 32, 48, (40,), block_rows=16),
    Case("many_rows", 2050, 256, 384, (0, 1000, 1, 49, 0, 0, 700, 290), block_rows=128, block_in=128, full=True),
    Case("many_rows_bf16", 2050, 256, 384, (0, 1000, 1, 49, 0, 0, 700, 290), "bfloat16", block_rows=128, full=True),
)
