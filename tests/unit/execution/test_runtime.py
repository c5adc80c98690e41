"""The runtime: arrays there and back, and what it measures."""

import numpy as np
import pytest

from tpu_train.execution.runtime import Runtime


def test_trees_go_to_the_device_and_back() -> None:
    runtime = Runtime("cpu")
    tree = {"a": np.arange(3, dtype=np.int32), "b": {"c": np.float32(1.5)}}
    back = runtime.fetch(runtime.put(tree))
    np.testing.assert_array_equal(back["a"], [0, 1, 2])
    assert back["b"]["c"] == 1.5


def test_the_cpus_peak_memory_is_the_processs() -> None:
    peak = Runtime("cpu").peak_memory()
    assert peak.source == "process_resident"
    assert 100e6 < peak.num_bytes < 100e9  # torch and jax alone take some hundred MB


def test_the_cpus_peak_flops_are_measured() -> None:
    assert 1e9 < Runtime("cpu").peak_flops("float32") < 1e14


def test_a_platform_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime\.platform=tpu"):
        Runtime("tpu")
