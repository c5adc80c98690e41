"""The devices of a TPU slice that is not there: programs are compiled for them by the real TPU compiler."""

import importlib.util
import os
from typing import Any

# What libtpu asks for where no TPU is: without them it looks for a metadata server, and for other users of the chips.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def tpu_devices(name: str, num_slices: int = 1) -> tuple[Any, ...]:
    """The devices of a topology, to compile for.

    Args:
        name: generation and shape in chips, such as `v5p:2x2x2`; v4 and tpu7x have two devices a chip.
        num_slices: slices of that shape.

    Raises:
        ValueError: libtpu is not installed, or has no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for a TPU needs its compiler; pip install 'tpu-train[tpu]' (Linux on x86-64)")
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, num_slices=num_slices)
    except Exception as error:  # JAX passes on what libtpu says, of many kinds
        raise ValueError(f"topology {name}: {str(error).splitlines()[0]}") from error
    return tuple(found.devices)
