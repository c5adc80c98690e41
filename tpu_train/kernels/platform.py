"""Which platform a run gets, as far as that is known without starting JAX."""

import glob
from typing import Literal

from tpu_train.config.schema import Run

Platform = Literal["cpu", "tpu", "gpu"]

# Device files of TPUs and NVIDIA GPUs; where there are none JAX's own choice is the CPU.
_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*")


def has_accelerator() -> bool:
    """Whether this machine has a TPU or GPU, by its device files."""
    return any(glob.glob(pattern) for pattern in _ACCELERATORS)


def known_platform(run: Run) -> Platform | None:
    """The platform that a run asks for, or the CPU where the machine has nothing else; None: JAX will tell."""
    if run.runtime.platform != "auto":
        return run.runtime.platform
    return None if has_accelerator() else "cpu"
