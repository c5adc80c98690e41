"""Keeps memory that XLA:CPU frees, for its next step.

XLA allocates a program's temporaries at every call. glibc gives blocks of that size back to the kernel as soon as they
are freed, so each step faults in, and the kernel zeroes, all of them again. Measured (docs/measurements.md): a step
with large logits took 5.54 s without this and 3.82 s with it.
"""

import ctypes
import logging

log = logging.getLogger(__name__)

# malloc.h, parameter and value: no block gets a mapping of its own; the heap's free end is never given back (-1 becomes
# the largest size_t); all threads share the one heap that can grow without bound, as the others would map large blocks.
_POLICY = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_ARENA_MAX": (-8, 1)}


def keep_freed_memory() -> bool:
    """Makes this process's allocator reuse what was freed instead of returning it; False where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        log.debug("no mallopt in this C library: steps on the CPU page their temporaries in anew")
        return False
    accepted = [mallopt(parameter, value) == 1 for parameter, value in _POLICY.values()]
    return all(accepted)
