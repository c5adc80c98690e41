"""Worker processes give results in order, pass errors on, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Workers import what they are told by name, so their functions are of modules that they can import.
from tests.unit.data import worker_functions as functions
from tests.unit.data.helpers import make_cache, write_tokenizer
from tpu_train.data.documents import Tokenize
from tpu_train.data.loader import _MakeBatch
from tpu_train.data.packing import PackedStream, Packing, Part
from tpu_train.data.processes import ordered_map
from tpu_train.data.tokenizers import FileTokenizer


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("data-worker")]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_results_are_in_the_order_of_the_items(num_workers: int) -> None:
    assert list(ordered_map(functions.Slow(0.01), range(12), num_workers)) == [i * i for i in range(12)]
    assert list(ordered_map(functions.Slow(0), [], num_workers)) == []
    assert not workers()


def test_large_items_and_results_pass() -> None:
    items = [np.full(3_000_000, i) for i in range(5)]
    for item, result in zip(items, ordered_map(functions.double, items, 2), strict=True):
        np.testing.assert_array_equal(result, 2 * item)


def test_a_bounded_number_of_items_is_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for i in range(100):
            taken.append(i)
            yield i

    results = ordered_map(functions.Slow(0), items(), 2)
    assert next(results) == 0
    assert len(taken) == 5
    results.close()
    assert not workers()


def test_an_error_comes_in_the_place_of_its_result() -> None:
    results = ordered_map(functions.refuse_three, range(9), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three is refused"):
        next(results)
    assert not workers()


def test_a_worker_that_dies_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"ended with exit code -9: it was killed, perhaps for want of memory"):
        list(ordered_map(functions.kill_self, range(3), 2))
    assert not workers()


def test_workers_that_tokenize_and_load_import_neither_torch_nor_jax_nor_the_program(tmp_path: Path) -> None:
    import torch  # noqa: F401

    tokenizer = FileTokenizer(write_tokenizer(tmp_path))
    stream = PackedStream(make_cache(tmp_path / "c", [[1]]), Part(False, 0.0), Packing(4, "blocks", 0, True, None))
    items = [Tokenize(tokenizer, "text", stop_at_bad=True), _MakeBatch(stream, 2, slice(None))]
    for modules in ordered_map(functions.loaded_modules, items, 1):
        assert {"numpy", "tpu_train", "tokenizers"} <= set(modules)
        assert not {"torch", "jax", "pytest", "hydra", "omegaconf", "datasets", "multiprocessing"} & set(modules)


def test_what_workers_print_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(ordered_map(functions.shout, [1, 2], 1)) == [1, 2]
    assert "shouting" in capfd.readouterr().err


def test_workers_end_with_a_run_that_is_killed() -> None:
    code = (
        "from tests.unit.data import worker_functions as f; from tpu_train.data.processes import ordered_map\n"
        "for result in ordered_map(f.pid, range(10**9), 2): print(result, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        pids = {int(run.stdout.readline()) for _ in range(50)}
        run.kill()
    assert pids
    assert _ended(pids)


def _ended(pids: set[int]) -> bool:
    for _ in range(500):
        if not any(_is_running(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_of_the_terminal_is_for_the_run_only() -> None:
    results: Any = ordered_map(functions.pid, range(100), 1)
    os.kill(next(results), signal.SIGINT)
    assert len(list(results)) == 99
