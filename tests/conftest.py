"""What holds for all tests: eight virtual CPU devices, and tokenized data in a folder of the test session."""

import os
from pathlib import Path

import jax
import pytest

# Before any test module starts JAX. A run takes as many of them as its `runtime.devices` says.
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    # For every process of the tests; workers of pytest-xdist have a folder each.
    os.environ["XDG_CACHE_HOME"] = str(Path(tmp_path_factory.getbasetemp()) / "cache")
