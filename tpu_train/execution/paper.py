"""Devices on paper: programs can be captured (and, of a topology's devices, compiled) for them, and not be run."""

from collections.abc import Sequence
from typing import Any

from tpu_train.execution.placement import AxesOf, Placement, num_slices, order_devices
from tpu_train.execution.runtime import Runtime
from tpu_train.kernels.platform import Platform
from tpu_train.sharding.mesh import MeshShape


class PaperRuntime(Runtime):
    """A runtime without arrays.

    Args:
        devices: of a topology, or a number of devices that are only counted.
        platform: of the devices.
    """

    def __init__(
        self, devices: Sequence[Any] | int, platform: Platform = "cpu"
    ) -> None:  # no call of Runtime's, which starts JAX's devices
        self.platform = platform
        self._counted = isinstance(devices, int)
        self.devices = (None,) * devices if isinstance(devices, int) else tuple(devices)
        self.num_slices = 1 if self._counted else num_slices(self.devices)

    def placement(self, shape: MeshShape, axes_of: AxesOf) -> Placement:
        """Lays a mesh over the devices; see `Runtime.placement`."""
        devices = self.devices if self._counted else order_devices(self.devices, shape)
        return Placement(tuple(devices), shape, axes_of)
