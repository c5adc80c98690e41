"""The one interface to devices: arrays, programs, memory; JAX's PJRT client stands behind it.

Key idea: the loop, the checkpoints and the tools hold a `Runtime` and opaque arrays, never jax, so that another runtime
can stand beside this one.
"""

import dataclasses
import logging
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_train.execution.checkpoint_io import restore
from tpu_train.execution.host_memory import keep_freed_memory
from tpu_train.graph.capture import Tree, map_leaves

log = logging.getLogger(__name__)

# Peak dense bfloat16 FLOP/s per chip: Google Cloud's TPU system architecture pages.
_PEAK_TFLOPS = {"TPU v4": 275, "TPU v5 lite": 197, "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU7x": 2307}


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """Most bytes in use so far, and who says so: the device's allocator, or the process's resident size on CPU."""

    num_bytes: int
    source: str


class Runtime:
    """Devices of one platform.

    Args:
        platform: "cpu", "tpu", "gpu", or "auto" for JAX's own choice.
        devices: virtual devices on the CPU.

    Raises:
        ValueError: a platform that is not there.
    """

    def __init__(self, platform: str = "auto", devices: int = 1) -> None:
        keep_freed_memory()  # before JAX starts its threads
        if platform != "auto":
            jax.config.update("jax_platforms", {"gpu": "cuda,rocm"}.get(platform, platform))
        if devices != 1:
            jax.config.update("jax_num_cpu_devices", devices)
        try:
            self.devices = jax.local_devices(backend=None if platform == "auto" else platform)
        except RuntimeError as error:
            raise ValueError(f"runtime.platform={platform}: {str(error).splitlines()[0]}") from error
        self.platform = self.devices[0].platform
        self.device_kind = self.devices[0].device_kind

    def put(self, tree: Tree) -> Tree:
        """Copies NumPy leaves to the first device; 64-bit integers become 32-bit."""
        return jax.device_put(map_leaves(lambda _, leaf: np.asarray(leaf), tree), self.devices[0])

    def fetch(self, tree: Tree) -> Tree:
        """Copies device leaves to NumPy, waiting for them."""
        return map_leaves(lambda _, leaf: np.asarray(leaf), tree)

    def restore(self, path: Path, specs: Tree) -> Tree:
        """Reads a checkpoint's arrays to the first device; `specs` has the shape and dtype of each."""
        return restore(path, specs, self.devices[0])

    def zeros_like(self, tree: Tree) -> Tree:
        """Zeros of the leaves' shapes and dtypes, each a buffer of its own."""
        return map_leaves(lambda _, leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)

    def peak_memory(self) -> PeakMemory:
        """The device allocator's peak; on CPU, which has none, the process's peak resident size."""
        stats = self.devices[0].memory_stats()
        if stats is not None:
            return PeakMemory(int(stats["peak_bytes_in_use"]), "device_allocator")
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux (getrusage(2))
        return PeakMemory(kilobytes * 1024, "process_resident")

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of one chip: the published figure on TPU, a measured matmul elsewhere.

        Args:
            dtype: "float32" or "bfloat16", the operands of the measured matmul.
        """
        if self.device_kind in _PEAK_TFLOPS:
            return _PEAK_TFLOPS[self.device_kind] * 1e12
        return _measure_matmul_flops(dtype)


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


def leaf_spec(leaf: Any) -> str:
    """`dtype[shape]` of an array, for messages."""
    return f"{leaf.dtype}{list(leaf.shape)}"
