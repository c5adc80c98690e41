"""The mesh of devices: named axes and their sizes, and a stand-in for it while a program is traced.

Key idea: a program is traced once, by one process that pretends to be one device of the mesh. PyTorch's fake process
group makes DTensor emit its collectives without anything to talk to; which device it pretends to be must not matter.
"""

import contextlib
import contextvars
import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

# Outermost first: neighbours of the last axis are the closest devices. `replica` may span slices.
AXES = ("replica", "fsdp", "expert", "tensor")
# Axes that the sequences of a batch are laid over; the others share their sequences.
DATA_AXES = ("replica", "fsdp", "expert")
# Axes that a parameter may be split over and gathered along to be used.
SHARD_AXES = ("fsdp", "expert")

# For each dimension of a tensor, the axes that it is split over, outermost first.
DimAxes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Number of devices along each axis.

    Attributes:
        replica: copies of the sharded model; their gradients are summed.
        fsdp: devices that share each parameter.
        tensor: devices that share each matrix product.
        expert: devices that share the experts of a mixture, which tokens are sent to.
    """

    replica: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.size_of(AXES)

    @property
    def data_size(self) -> int:
        """Parts that a batch is split into."""
        return self.size_of(DATA_AXES)

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Devices along these axes together."""
        return math.prod(getattr(self, axis) for axis in axes)

    def real(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the axes that have more than one device."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES if axis != "expert" or self.expert > 1)


ONE_DEVICE = MeshShape()


def fill(sizes: Mapping[str, int], num_devices: int) -> MeshShape:
    """The mesh of all devices, with the one size that is -1 computed.

    Raises:
        ValueError: two sizes are -1, or the sizes do not make up the number of devices.
    """
    free = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    asked = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    if len(free) > 1:
        raise ValueError(f"{asked}: one axis can be -1 (what the others leave), not {len(free)}")
    if not free and fixed != num_devices:
        raise ValueError(f"{asked} is a mesh of {fixed} devices, and there are {num_devices}")
    if num_devices % fixed:
        raise ValueError(f"{asked} takes a multiple of {fixed} devices, and there are {num_devices}")
    return MeshShape(**{axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()})


@dataclasses.dataclass(frozen=True)
class TracedMesh:
    """The stand-in: PyTorch's mesh, and axis and size behind each of its process groups' names."""

    device_mesh: Any
    groups: Mapping[str, tuple[str, int]]


_TRACED: contextvars.ContextVar[TracedMesh | None] = contextvars.ContextVar("traced_mesh", default=None)


def traced_mesh() -> TracedMesh:
    """The stand-in of the program that is being traced."""
    mesh = _TRACED.get()
    assert mesh is not None, "collectives are traced inside traced_as()"
    return mesh


@contextlib.contextmanager
def traced_as(shape: MeshShape, rank: int) -> Iterator[None]:
    """Inside, PyTorch takes this process for device `rank` of the mesh.

    Raises:
        ValueError: PyTorch's process group is in use already.
    """
    if shape.size == 1:
        yield
        return
    if dist.is_initialized():
        raise ValueError("torch.distributed is initialized already; a program is traced in a process without it")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # PyTorch's replacement marks every line of a traceback with the rank
    dist.init_process_group("fake", rank=rank, world_size=shape.size, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", tuple(getattr(shape, axis) for axis in AXES), mesh_dim_names=AXES)
        groups = {str(mesh.get_group(axis).group_name): (axis, getattr(shape, axis)) for axis in AXES}
        token = _TRACED.set(TracedMesh(mesh, groups))
        try:
            yield
        finally:
            _TRACED.reset(token)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
