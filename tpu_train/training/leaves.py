"""Where the leaves of a run's state and batches lie on the mesh, by name, and how a batch gets there."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from tpu_train.execution.placement import AxesOf, Placement
from tpu_train.graph.capture import Tree
from tpu_train.sharding.layout import Layout
from tpu_train.sharding.mesh import AXES, DATA_AXES, DimAxes


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """How the tensors of a batch are laid out.

    With accumulation microbatches are a dimension of their own, the first, so that each consists of the same sequences
    on any mesh.

    Attributes:
        sequence_dims: the objective's; see `Objective`.
        num_microbatches: 1 for no such dimension.
    """

    sequence_dims: Mapping[str, int | None]
    num_microbatches: int = 1

    def axes_of(self, field: str) -> DimAxes:
        """Axes of the dimensions of a field."""
        dim = self.sequence_dims.get(field, 0)
        if dim is None:
            return ()
        return (*((),) * (dim + (self.num_microbatches > 1)), DATA_AXES)

    def put(self, placement: Placement, batch: Mapping[str, np.ndarray]) -> Tree:
        """Copies this process's rows of a batch to the devices, the first microbatch's rows first."""
        return {field: self._put(placement, field, values) for field, values in batch.items()}

    def _put(self, placement: Placement, field: str, values: np.ndarray) -> Tree:
        dim, name, count = self.sequence_dims.get(field, 0), f"batch.{field}", self.num_microbatches
        if dim is None:
            whole = np.broadcast_to(values, (count, *values.shape)) if count > 1 else values
            return placement.put({field: whole}, "batch")[field]
        rows = values.shape[dim]
        if rows % count:
            raise ValueError(f"{name} has {rows} rows, which grad_accumulation={count} does not divide")
        if count > 1:
            shape = (*values.shape[:dim], count, rows // count, *values.shape[dim + 1 :])
            values, dim = np.moveaxis(values.reshape(shape), dim, 0), dim + 1
        # In parts of the batch, one for each device along the data axes.
        parts = placement.own_rows(placement.shape.data_size)
        part, left = divmod(rows // count, parts.stop - parts.start)
        if left:
            raise ValueError(f"{name} has {rows} rows, which cannot be laid over {parts.stop - parts.start} devices")
        return placement.put_rows(name, values, dim, part * placement.shape.data_size, part * parts.start)


def leaf_axes(layouts: Mapping[str, Layout], batches: BatchLayout) -> AxesOf:
    """The axes of a leaf: of `state.*` or a part of it, of `batch.*`, and of `ask`, one number for each device."""

    def axes_of(name: str) -> DimAxes:
        part, _, rest = name.removeprefix("state.").partition(".")
        if part == "batch":
            return batches.axes_of(rest)
        if part == "ask":
            return (AXES,)
        if part == "optimizer":
            rest = rest.partition(".")[2]
        return axes_of_parameter(layouts, rest) if part in ("params", "frozen", "optimizer") else ()

    return axes_of


def axes_of_parameter(layouts: Mapping[str, Layout], name: str) -> DimAxes:
    """Those of its layout; () for what is no parameter."""
    return layouts[name].axes if name in layouts else ()
