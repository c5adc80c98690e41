"""The one interface to devices: arrays, programs, memory; JAX's PJRT client stands behind it.

Key idea: the loop, the checkpoints and the tools hold a `Runtime` and opaque arrays, never jax, so that another runtime
can stand beside this one.
"""

import contextlib
import dataclasses
import logging
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train.execution.host_memory import keep_freed_memory
from tpu_train.execution.placement import AxesOf, Placement, num_chips, num_slices, order_devices
from tpu_train.graph.capture import Tree, map_leaves
from tpu_train.kernels.platform import has_accelerator
from tpu_train.sharding.mesh import MeshShape

log = logging.getLogger(__name__)

# Peak dense bfloat16 FLOP/s per chip: Google Cloud's TPU system architecture pages.
_PEAK_TFLOPS = {"TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU7x": 2307}


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Most bytes in use so far, and who says so: the device's allocator, or the process's resident size on CPU."""

    num_bytes: int
    source: str


class Runtime:
    """Devices of one platform, of all processes.

    Args:
        platform: "cpu", "tpu", "gpu", or "auto" for JAX's own choice.
        devices: virtual devices on the CPU, of this process.

    Raises:
        ValueError: a platform that is not there, or a number of CPU devices that this process can no longer have.
    """

    def __init__(self, platform: str = "auto", devices: int = 1) -> None:
        keep_freed_memory()  # before JAX starts its threads
        if platform == "auto" and not has_accelerator():
            platform = "cpu"  # an installed libtpu would look for its chips for minutes
        if platform != "auto":
            jax.config.update("jax_platforms", {"gpu": "cuda,rocm"}.get(platform, platform))
        if devices != 1:
            # A process whose JAX has started keeps the number it started with.
            with contextlib.suppress(RuntimeError):
                jax.config.update("jax_num_cpu_devices", devices)
        try:
            found = jax.devices(None if platform == "auto" else platform)
        except RuntimeError as error:
            raise ValueError(f"runtime.platform={platform}: {str(error).splitlines()[0]}") from error
        self.platform = found[0].platform
        self.devices = tuple(found)
        if self.platform == "cpu":
            self.devices = _first_of_each_process(found, devices)
        self.device_kind = self.devices[0].device_kind
        self.num_slices = num_slices(self.devices)
        self.num_processes, self.process_index = jax.process_count(), jax.process_index()
        self._home = next(device for device in self.devices if device.process_index == self.process_index)

    def placement(self, shape: MeshShape, axes_of: AxesOf) -> Placement:
        """Lays a mesh over the devices.

        Raises:
            ValueError: its axes do not fit the slices.
        """
        if shape.size == 1:
            return Placement((self._home,))
        return Placement(order_devices(self.devices, shape), shape, axes_of)

    def num_chips(self, placement: Placement) -> int:
        """Chips that a mesh is laid over."""
        return num_chips(placement.devices)

    def put(self, tree: Tree) -> Tree:
        """Copies NumPy leaves to this process's first device; 64-bit integers become 32-bit."""
        return jax.device_put(map_leaves(lambda _, leaf: np.asarray(leaf), tree), self._home)

    def fetch(self, tree: Tree) -> Tree:
        """Copies device leaves to NumPy, waiting for them."""
        return map_leaves(lambda _, leaf: np.asarray(leaf), tree)

    def zeros_like(self, tree: Tree) -> Tree:
        """Zeros of the leaves' shapes, dtypes and places, each a buffer of its own."""
        return map_leaves(lambda _, leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), tree)

    def peak_memory(self) -> PeakMemory:
        """The device allocator's peak; on CPU, which has none, the process's peak resident size."""
        stats = self._home.memory_stats()
        if stats is not None:
            return PeakMemory(int(stats["peak_bytes_in_use"]), "device_allocator")
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux (getrusage(2))
        return PeakMemory(kilobytes * 1024, "process_resident")

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of one chip: the published figure on TPU, a measured matmul elsewhere.

        Virtual devices share a CPU, so each has a part of what the matmul reaches.

        Args:
            dtype: "float32" or "bfloat16", the operands of the measured matmul.
        """
        if self.device_kind in _PEAK_TFLOPS:
            return _PEAK_TFLOPS[self.device_kind] * 1e12
        shared = sum(device.process_index == self._home.process_index for device in self.devices)
        return _measure_matmul_flops(dtype) / (shared if self.platform == "cpu" else 1)


def _measure_matmul_flops(dtype: str, size: int = 1024, repeats: int = 7) -> float:
    """Best FLOP/s of a square product: at 1024 the CPU's product is compute-bound and takes tens of milliseconds."""
    x = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    log.debug("matmul %s: best %.2g s, median %.2g s", dtype, min(seconds), statistics.median(seconds))
    return 2 * size**3 / min(seconds)


def _first_of_each_process(devices: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The first `count` devices of each process.

    Raises:
        ValueError: JAX has started with fewer.
    """
    by_process: dict[int, list[Any]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    for process, own in by_process.items():
        if len(own) < count:
            raise ValueError(f"runtime.devices={count}: process {process} has started JAX with {len(own)} CPU devices")
    return tuple(device for own in by_process.values() for device in own[:count])
