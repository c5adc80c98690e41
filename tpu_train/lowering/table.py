"""The ATen→JAX table: every op that lowers, joined from the families, where an op in two is an error."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any

from tpu_train.kernels.jax_op import LOWERINGS
from tpu_train.lowering.ops import (
    activations,
    attention,
    collectives,
    control_flow,
    creation,
    indexing,
    losses,
    matmul,
    normalization,
    pointwise,
    random,
    reductions,
    spatial,
    views,
)

Entry = Callable[..., Any]


def _join(*families: Mapping[Any, Entry]) -> dict[Any, Entry]:
    joined: dict[Any, Entry] = {}
    for family in families:
        for op, entry in family.items():
            assert op not in joined, f"{op} has two entries in the table"
            joined[op] = entry
    return joined


_ATEN = _join(
    activations.OPS,
    attention.OPS,
    collectives.OPS,
    control_flow.OPS,
    creation.OPS,
    indexing.OPS,
    losses.OPS,
    matmul.OPS,
    normalization.OPS,
    pointwise.OPS,
    random.OPS,
    reductions.OPS,
    spatial.OPS,
    views.OPS,
)

# With the ops that are made of JAX functions, a user's own included.
TABLE: Mapping[Any, Entry] = ChainMap(_ATEN, LOWERINGS)
