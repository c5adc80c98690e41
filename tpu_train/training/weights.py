"""Weights by name, one tensor at a time: what checkpoints and Hugging Face folders have in common.

Key idea: whoever reads weights asks for a name and gets one array, so that no host ever needs the memory of a model.
"""

import dataclasses
from collections.abc import Callable, Mapping

import ml_dtypes
import numpy as np


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """Shape and dtype of a tensor; the dtype by NumPy's name, `bfloat16` included."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class WeightSource:
    """Where a model's weights come from.

    Attributes:
        place: the folder, for messages.
        specs: of every tensor, by the model's own full names.
        load: from a name to its array; bfloat16 as ml_dtypes has it.
    """

    place: str
    specs: Mapping[str, WeightSpec]
    load: Callable[[str], np.ndarray]


def load_as(source: WeightSource, name: str, dtype: str) -> np.ndarray:
    """A tensor in the dtype of this name; `bfloat16` rounds to nearest even."""
    return source.load(name).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype), copy=False)
