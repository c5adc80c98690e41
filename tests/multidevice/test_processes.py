"""Several real processes on the loopback: they train as one, stop as one, and none waits for one that is gone."""

import contextlib
import dataclasses
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.unit.training.test_train_command import TINY, metrics_of
from tpu_train.training.checkpoints import Checkpoints
from tpu_train.training.saved_run import SavedRun

WORDS = [
    *[word for word in TINY if not word.startswith(("data=", "training.batch_per_device="))],
    "training.global_batch_size=8",
    "training.grad_accumulation=2",
    "training.log_every=1000",
    "optimizer.lr=3e-4",
    "runtime.platform=cpu",
    "parallelism=fsdp",
    "parallelism.replicate_below=0",
    "run_dir=r",
]
STEPS, EVERY = 48, 12
UNTIL_THE_END = ["data=stdlib", f"training.steps={STEPS}", f"checkpoint.every={EVERY}", "checkpoint.keep_last=100"]
ON_AND_ON = ["data=stdlib", "training.steps=1000000"]
NUM_DEVICES = 4  # of a run, however many processes have them
START_SECONDS, END_SECONDS = 150, 60


@dataclasses.dataclass
class Fleet:
    """Started processes of one run, their stderr in files; killed by `fleets` if a test leaves them."""

    folder: Path
    started: list[subprocess.Popen[bytes]]

    @property
    def run_dir(self) -> Path:
        return self.folder / "r"

    def err(self, index: int) -> str:
        return (self.folder / f"err{index}").read_text()

    def codes(self, seconds: float) -> list[int]:
        """Exit codes of all, in order.

        Raises:
            TimeoutExpired: not all have ended by then.
        """
        deadline = time.monotonic() + seconds
        return [process.wait(max(0.0, deadline - time.monotonic())) for process in self.started]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert all(process.poll() is None for process in self.started), self.err(0) + self.err(1)
            assert time.monotonic() < deadline, self.err(0)
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        path = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and path.read_text().count("\n") >= step)

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


Start = Callable[..., Fleet]


@contextlib.contextmanager
def fleets(cache: Path) -> Iterator[Start]:
    made: list[Fleet] = []
    # Runs by as many processes are one program: compiled once, it takes seconds less of each.
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def start(folder: Path, count: int, *words: str, own: dict[int, list[str]] | None = None) -> Fleet:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        processes = []
        for index in range(count):
            told = [f"runtime.coordinator=127.0.0.1:{port}", f"runtime.num_processes={count}"]
            told = [*told, f"runtime.process_id={index}"] if count > 1 else []
            told.append(f"runtime.devices={NUM_DEVICES // count}")
            command = [sys.executable, "-m", "tpu_train.cli", *WORDS, *told, *words, *(own or {}).get(index, [])]
            with (folder / f"err{index}").open("wb") as err:
                processes.append(
                    subprocess.Popen(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, stderr=err)
                )
        made.append(Fleet(folder, processes))
        return made[-1]

    try:
        yield start
    finally:
        for fleet in made:
            fleet.kill()


@pytest.fixture(scope="module", name="cache")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(name="start")
def _start(cache: Path) -> Iterator[Start]:
    with fleets(cache) as start:
        yield start


Undisturbed = Callable[[int], Path]


@pytest.fixture(scope="module", name="undisturbed")
def _undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Undisturbed]:
    """The run folder of a run by so many processes."""
    with fleets(cache) as start:

        @functools.cache
        def run(count: int) -> Path:
            fleet = start(tmp_path_factory.mktemp(f"of_{count}"), count, *UNTIL_THE_END)
            assert fleet.codes(START_SECONDS) == [0] * count, fleet.err(0)
            return fleet.run_dir

        yield run


def assert_equal(one: Path, many: Path) -> None:
    """DESIGN's tolerances: losses 1e-5, norms 1e-4, weights by AdamW 1e-5 of their norm."""
    lines, expected = metrics_of(many), metrics_of(one)
    assert [line["step"] for line in lines] == [line["step"] for line in expected] == list(range(1, STEPS + 1))
    for key, rtol in (("loss", 1e-5), ("grad_norm", 1e-4), ("tokens", 0)):
        np.testing.assert_allclose([line[key] for line in lines], [line[key] for line in expected], rtol=rtol)
    assert Checkpoints(many).steps() == Checkpoints(one).steps() == list(range(EVERY, STEPS + 1, EVERY))
    Checkpoints(many).check(STEPS)
    found, wanted = SavedRun(many).weights(STEPS), SavedRun(one).weights(STEPS)
    assert found.specs.keys() == wanted.specs.keys()
    for name in wanted.specs:
        value = wanted.load(name)
        assert np.linalg.norm(found.load(name) - value) / np.linalg.norm(value) <= 1e-5, name


@pytest.mark.parametrize("count", [2, 4])
def test_processes_equal_one(undisturbed: Undisturbed, count: int) -> None:
    assert_equal(undisturbed(1), undisturbed(count))


@pytest.mark.parametrize("signalled", [0, 1])
def test_sigterm_to_one_ends_all_after_one_step_with_one_checkpoint(
    tmp_path: Path, start: Start, signalled: int
) -> None:
    fleet = start(tmp_path, 2, *ON_AND_ON)
    fleet.wait_for_step(3)
    fleet.started[signalled].send_signal(signal.SIGTERM)
    assert fleet.codes(END_SECONDS) == [75, 75], fleet.err(0) + fleet.err(1)
    (step,) = Checkpoints(fleet.run_dir).steps()
    Checkpoints(fleet.run_dir).check(step)
    assert [line["step"] for line in metrics_of(fleet.run_dir)] == list(range(1, step + 1))
    reasons = ["another process was asked to", "another process was asked to"]
    reasons[signalled] = "SIGTERM"
    for index, reason in enumerate(reasons):
        assert f"stopping after step {step}: {reason}" in fleet.err(index)
    assert "stopped; go on with: tpu-train model=qwen3_debug" in fleet.err(0).splitlines()[-1]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_ends_all_and_the_restart_equals_the_undisturbed_run(
    tmp_path: Path, start: Start, undisturbed: Undisturbed, killed: int
) -> None:
    fleet = start(tmp_path, 2, *UNTIL_THE_END)
    fleet.wait_for(lambda: EVERY in Checkpoints(fleet.run_dir).steps())
    fleet.started[killed].kill()
    expected = [1, 1]
    expected[killed] = -signal.SIGKILL
    assert fleet.codes(END_SECONDS) == expected, fleet.err(1 - killed)
    last = fleet.err(1 - killed).splitlines()[-1]
    assert "lost" in last or "process 0 of 2 ended: it does not answer" in last
    assert STEPS not in Checkpoints(fleet.run_dir).steps()
    again = start(tmp_path, 2, *UNTIL_THE_END)
    assert again.codes(START_SECONDS) == [0, 0], again.err(0) + again.err(1)
    assert "going on after step" in again.err(0)
    assert_equal(undisturbed(1), again.run_dir)


def test_the_clock_means_the_same_step_to_all(tmp_path: Path, start: Start) -> None:
    fleet = start(tmp_path, 2, *ON_AND_ON, "checkpoint.every=1s", "checkpoint.keep_last=100")
    checkpoints = Checkpoints(fleet.run_dir)
    fleet.wait_for(lambda: len(checkpoints.steps()) >= 3)
    fleet.started[1].terminate()
    assert fleet.codes(END_SECONDS) == [75, 75], fleet.err(0) + fleet.err(1)
    steps = checkpoints.steps()
    assert steps[-1] == metrics_of(fleet.run_dir)[-1]["step"]
    for step in steps:  # one that the processes began at different steps would not be whole, or never end
        checkpoints.check(step)
        weights = SavedRun(fleet.run_dir).weights(step)
        assert all(np.isfinite(weights.load(name)).all() for name in weights.specs)


@pytest.mark.parametrize("refused", [0, 1])
def test_data_that_one_host_does_not_have_ends_all(tmp_path: Path, start: Start, refused: int) -> None:
    (tmp_path / "here.txt").write_text("to be or not to be " * 1000)
    paths = ["data.path=here.txt", "data.path=here.txt"]
    paths[refused] = "data.path=missing.txt"
    own = {index: [path] for index, path in enumerate(paths)}
    fleet = start(tmp_path, 2, "data=text", "training.steps=5", own=own)
    assert fleet.codes(END_SECONDS) == [2, 2], fleet.err(0) + fleet.err(1)
    for index in (0, 1):
        assert "missing.txt" in fleet.err(index)
        assert "Traceback" not in fleet.err(index)
    assert f"process {refused} of 2: was refused: command line 'data.path=missing.txt'" in fleet.err(1 - refused)
    assert not fleet.run_dir.exists()


@pytest.mark.parametrize("refused", [0, 1])
def test_what_one_process_is_refused_for_after_they_met_ends_all(tmp_path: Path, start: Start, refused: int) -> None:
    own = {refused: ["checkpoint.init_from=missing"]}
    fleet = start(tmp_path, 2, "data=synthetic", "training.steps=5", own=own)
    assert fleet.codes(END_SECONDS) == [2, 2], fleet.err(0) + fleet.err(1)
    assert "command line 'checkpoint.init_from=missing': checkpoint.init_from" in fleet.err(refused)
    last = fleet.err(1 - refused).splitlines()[-1]
    assert f"process {refused} of 2 ended: command line 'checkpoint.init_from=missing'" in last
    assert last.endswith(f"process {1 - refused} ends too")


def test_one_device_for_processes_that_the_environment_tells_of_is_refused_by_all(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    jobset = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "train", "NNODES": "2"}
    jobset["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "tpu_train.cli", *TINY, "runtime.platform=cpu", "run_dir=r"]
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **jobset, "JOB_COMPLETION_INDEX": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for process in started:
            _, err = process.communicate(timeout=END_SECONDS)
            assert process.returncode == 2, err
            assert "parallelism is single, one device, and there are 2 processes; choose another" in err
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not (tmp_path / "r").exists()
