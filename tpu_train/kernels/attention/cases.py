"""The calls that every implementation of attention is tested on, against the definition in fp64."""

import dataclasses
from typing import Literal

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: shapes, dtype, documents and window.

    Attributes:
        seq_len: S.
        num_heads: H.
        num_kv_heads: K.
        head_dim: N.
        dtype: of query, key, value and result.
        documents: lengths of the documents of each sequence, which add up to S; () for no segment ids. One tuple per
            sequence of the batch.
        window: how many tokens a query sees; None for all earlier ones.
    """

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    documents: tuple[tuple[int, ...], ...] = ((),)
    window: int | None = None

    def __str__(self) -> str:
        packed = "-packed" if self.documents[0] else ""
        window = f"-window{self.window}" if self.window else ""
        return f"s{self.seq_len}-h{self.num_heads}k{self.num_kv_heads}n{self.head_dim}-{self.dtype}{packed}{window}"

    @property
    def batch(self) -> int:
        """B."""
        return len(self.documents)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Query, key, value and the result's gradient: standard normal, the same in every process."""
        rng = np.random.default_rng(0)
        dtype = np.dtype(np.float32 if self.dtype == "float32" else ml_dtypes.bfloat16)

        def draw(heads: int) -> np.ndarray:
            shape = (self.batch, heads, self.seq_len, self.head_dim)
            return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

        return draw(self.num_heads), draw(self.num_kv_heads), draw(self.num_kv_heads), draw(self.num_heads)

    def segment_ids(self) -> np.ndarray | None:
        """Int32 [B, S], counted from 1 in each sequence; None without documents."""
        if not self.documents[0]:
            return None
        rows = [np.repeat(np.arange(1, len(row) + 1), row) for row in self.documents]
        return np.stack(rows).astype(np.int32)


# One thing at a time, at a size that every implementation, interpreted kernels too, runs in about a second.
SMALL = [
    Case(128, 32, 8, 128),
    Case(256, 4, 4, 64),
    Case(256, 4, 1, 128, window=1000),
    Case(256, 4, 2, 48),
    Case(256, 8, 2, 128, "bfloat16"),
    Case(256, 4, 2, 64, documents=((100, 156), (256,))),
    Case(256, 4, 2, 64, window=2),
    Case(256, 4, 2, 64, window=100),
    Case(384, 4, 2, 64, documents=((5, 251, 128), (128, 128, 128)), window=130),
    Case(384, 4, 2, 64, "bfloat16", documents=((5, 251, 128),), window=130),
]
LARGE = [
    Case(1024, 8, 2, 128, documents=((512, 500, 12), (1024,))),
    Case(1024, 4, 4, 128, window=300),
    Case(1024, 8, 2, 64, "bfloat16", documents=((1000, 24),), window=300),
]
# The definition makes several S x S arrays per head of these, in fp64.
LONG = [
    Case(1024, 32, 8, 64, documents=((300, 724),)),
    Case(1024, 32, 8, 128, "bfloat16"),
    Case(4096, 4, 4, 64, documents=((4000, 96),)),
    Case(4096, 4, 2, 128, window=1000),
    Case(4096, 8, 2, 128, "bfloat16"),
    Case(4096, 4, 1, 64, "bfloat16", documents=((1, 2047, 2048),)),
]
CASES = [*SMALL, *LARGE, *LONG]
