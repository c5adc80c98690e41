"""Where the leaves of a program's inputs and outputs lie on the devices of a mesh, by name.

Key idea: a layout is a list of axis names for each dimension; here it becomes JAX's sharding. One device is the mesh
without axes, for which a program is plain `jax.jit`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tpu_train.graph.capture import Tree, map_leaves
from tpu_train.sharding.mesh import AXES, DATA_AXES, ONE_DEVICE, DimAxes, MeshShape

# Dotted name of a leaf (`state.params.norm.weight`) to the axes of its dimensions; () is a copy on each device.
AxesOf = Callable[[str], DimAxes]


def _nowhere_split(_: str) -> DimAxes:
    return ()


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices, and how leaves lie on them.

    Attributes:
        devices: JAX's, in the order of the mesh; at least one.
        shape: of the mesh.
        axes_of: see `AxesOf`.
    """

    devices: tuple[Any, ...]
    shape: MeshShape = ONE_DEVICE
    axes_of: AxesOf = _nowhere_split

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """JAX's mesh."""
        shape = [getattr(self.shape, axis) for axis in AXES]
        return jax.sharding.Mesh(np.array(self.devices, dtype=object).reshape(shape), AXES)

    def spec(self, name: str) -> PartitionSpec:
        """JAX's name for a leaf's layout."""
        return PartitionSpec(*(axes or None for axes in self.axes_of(name)))

    def sharding(self, name: str = "") -> jax.sharding.Sharding:
        """Of a leaf; without a name that of a copy on each device."""
        if self.shape.size == 1:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, self.spec(name) if name else PartitionSpec())

    def shardings(self, tree: Tree, prefix: str = "") -> Tree:
        """The sharding of each leaf."""
        return map_leaves(lambda name, _: self.sharding(name), tree, prefix)

    def put(self, tree: Tree, prefix: str = "") -> Tree:
        """Copies NumPy leaves, of which every process has the whole, to the devices."""

        def place(name: str, leaf: Any) -> Any:
            array = np.asarray(leaf)
            sharding = self.sharding(name)
            if sharding.is_fully_addressable:
                return jax.device_put(array, sharding)
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[_known(index)])

        return map_leaves(place, tree, prefix)

    def put_rows(self, name: str, rows: np.ndarray, dim: int, num_rows: int, first: int) -> Any:
        """Makes a leaf of the rows that this process has of it.

        Args:
            name: of the leaf.
            rows: the part of the leaf along `dim`.
            dim: that the rows are counted along.
            num_rows: of the whole leaf.
            first: of the part in the whole.
        """
        shape = (*rows.shape[:dim], num_rows, *rows.shape[dim + 1 :])

        def part(index: Any) -> np.ndarray:
            before, (own, *after) = _known(index)[:dim], _known(index)[dim:]
            start, stop, _ = own.indices(num_rows)
            return rows[(*before, slice(start - first, stop - first), *after)]

        return jax.make_array_from_callback(shape, self.sharding(name), part)

    def fill(self, name: str, value: np.generic) -> Any:
        """A leaf with one element for each device, all of this process's the same."""

        def part(index: Any) -> np.ndarray:
            return np.full(len(range(*_known(index)[0].indices(self.shape.size))), value)

        return jax.make_array_from_callback((self.shape.size,), self.sharding(name), part)

    def own_rows(self, num_rows: int) -> slice:
        """Which of `num_rows`, laid over the data axes, this process's devices need."""
        sharding = NamedSharding(self.mesh, PartitionSpec(DATA_AXES))
        parts = [
            _known(index)[0].indices(num_rows)
            for index in sharding.addressable_devices_indices_map((num_rows,)).values()
        ]
        return slice(min(start for start, _, _ in parts), max(stop for _, stop, _ in parts))


def _known(index: Any) -> tuple[slice, ...]:
    """The index of a part; JAX has none only for what is not an array."""
    assert index is not None
    return index


def order_devices(devices: Sequence[Any], shape: MeshShape) -> tuple[Any, ...]:
    """The devices such that those near on the mesh are near in the machine: axes inside a slice, replicas over slices.

    Raises:
        ValueError: several slices that the replica axis cannot be laid over.
    """
    from jax.experimental import mesh_utils

    sizes = [getattr(shape, axis) for axis in AXES]
    slices = num_slices(devices)
    if slices > 1:
        if shape.replica % slices:
            raise ValueError(
                f"parallelism.replica={shape.replica} cannot be laid over {slices} slices; use a multiple of {slices}, "
                "for instance parallelism=fsdp_2d, whose default is one replica a slice"
            )
        inside = [sizes[0] // slices, *sizes[1:]]
        mesh = mesh_utils.create_hybrid_device_mesh(inside, [slices, 1, 1], list(devices))
    else:
        mesh = mesh_utils.create_device_mesh(sizes, list(devices), allow_split_physical_axes=True)
    return tuple(mesh.flat)


def num_slices(devices: Sequence[Any]) -> int:
    """Slices that the devices are of; a slice is what a fast network connects."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def num_chips(devices: Sequence[Any]) -> int:
    """Chips of the devices: v4 and tpu7x have two devices on one, elsewhere a device is a chip."""
    chips = {
        (getattr(device, "slice_index", 0), tuple(device.coords)) for device in devices if hasattr(device, "coords")
    }
    return len(chips) or len(devices)
