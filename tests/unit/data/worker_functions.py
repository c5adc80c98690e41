"""Functions for worker processes: of a module of their own, which imports as little as a worker does."""

import dataclasses
import os
import signal
import sys
import time

import numpy as np


@dataclasses.dataclass(frozen=True)
class Slow:
    """Squares; the earlier items take longer."""

    seconds: float

    def __call__(self, item: int) -> int:
        time.sleep(self.seconds * (12 - item) / 4)
        return item * item


def double(item: np.ndarray) -> np.ndarray:
    return 2 * item


def refuse_three(item: int) -> int:
    if item == 3:
        raise ValueError("three is refused")
    return item


def kill_self(item: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return item


def loaded_modules(item: object) -> list[str]:
    """Modules of a worker that has the item."""
    return sorted({name.partition(".")[0] for name in sys.modules})


def shout(item: int) -> int:
    print("shouting", flush=True)
    return item


def pid(item: int) -> int:
    return os.getpid()
