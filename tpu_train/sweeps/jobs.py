"""The jobs of a sweep: a process and a folder each, and a record of how each ended.

Key idea: a job is `tpu-train train` with its overrides, as a person would type it. What one job does to its process (a
crash, the out-of-memory killer, another number of devices) does not reach the others or this process. Each is in a
session of its own, so that a signal reaches it once and from here, whoever sent it.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tpu_train.config.overrides import quoted
from tpu_train.sweeps.record import Record

PREEMPTED, INTERRUPTED = 75, 130


@dataclasses.dataclass(frozen=True)
class Job:
    """One job.

    Attributes:
        number: its place in the sweep.
        overrides: command-line words.
        folder: its run folder.
    """

    number: int
    overrides: tuple[str, ...]
    folder: Path


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        number: of the job.
        overrides: of the job.
        folder: of the job.
        status: done, failed, refused, preempted, interrupted, killed, not started.
        exit_code: of its process; negative for a signal; None where it was not started.
        loss: the last training loss, nats per token.
        validation_loss: the last held-out loss, nats per token.
        error: the last line that a job which is not done printed.
    """

    number: int
    overrides: tuple[str, ...]
    folder: str
    status: str
    exit_code: int | None
    loss: float | None = None
    validation_loss: float | None = None
    error: str = ""

    @property
    def objective(self) -> float | None:
        """What a sweeper that searches minimizes: the held-out loss, without one the training loss."""
        return self.loss if self.validation_loss is None else self.validation_loss


class Runner:
    """Runs jobs, some side by side, and records how they end.

    Args:
        record: of the sweep; finished jobs in it are not run again.
        arguments: of every job's command line besides its overrides.
    """

    def __init__(self, record: Record, arguments: Sequence[str] = ()) -> None:
        self.record = record
        self.outcomes: list[Outcome] = []
        self.stopped = self.interrupted = False
        self._arguments = tuple(arguments)
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._lock = threading.RLock()  # a signal may come while another one is passed on

    def run(self, jobs: Sequence[Job], num_side_by_side: int) -> list[Outcome]:
        """Runs jobs to their ends, in order, up to so many at a time."""
        with ThreadPoolExecutor(max_workers=num_side_by_side) as pool:
            futures = [pool.submit(self._run, job) for job in jobs]
            wait(futures)
        outcomes = [future.result() for future in futures]
        self.outcomes += outcomes
        return outcomes

    def signal(self, number: int) -> None:
        """Passes a signal on to the running jobs, each time it comes, and starts no more."""
        self.stopped = True
        self.interrupted |= number == signal.SIGINT
        with self._lock:
            for process in self._running.values():
                process.send_signal(number)

    def _run(self, job: Job) -> Outcome:
        if (earlier := self.record.finished(job.number)) is not None:
            _say(job, f"finished before, in {job.folder}")
            return Outcome(**{**earlier, "overrides": tuple(earlier["overrides"])})
        not_started = Outcome(job.number, job.overrides, str(job.folder), "not started", None)
        if self.stopped:
            return not_started
        job.folder.mkdir(parents=True, exist_ok=True)
        _say(job, " ".join(job.overrides))
        ended = self._process(job)
        if ended is None:
            return not_started
        code, last = ended
        outcome = _outcome(job, code, last)
        if code == PREEMPTED:
            self.stopped = True
        self.record.write(dataclasses.asdict(outcome))
        loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
        _say(job, f"{outcome.status}{loss}{f': {outcome.error}' if outcome.error else ''}")
        return outcome

    def _process(self, job: Job) -> tuple[int, str] | None:
        """Runs the job's process; gives its exit code and the last line it printed, None where it was not started."""
        last = ""
        command = [*_COMMAND, *job.overrides, f"run_dir={quoted(str(job.folder))}", *self._arguments]
        with (
            (job.folder / "console.txt").open("a", encoding="utf-8") as console,
            self._started(command, job) as process,
        ):
            if process is None:
                return None
            assert process.stdout is not None
            for line in process.stdout:
                console.write(line)
                console.flush()
                last = line.strip() or last
                _say(job, line.rstrip("\n"))
            return process.wait(), last

    @contextlib.contextmanager
    def _started(self, command: Sequence[str], job: Job) -> Iterator[subprocess.Popen[str] | None]:
        with self._lock:  # no signal comes between the start and the entry
            if self.stopped:
                yield None
                return
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
            self._running[job.number] = process
        with process:
            try:
                yield process
            finally:
                with self._lock:
                    del self._running[job.number]


_COMMAND = (sys.executable, "-m", "tpu_train.cli", "train")


def final_losses(metrics: Path) -> tuple[float | None, float | None]:
    """The last training loss and the last held-out loss of a `metrics.jsonl`; None for what it does not have."""
    found: dict[str, float] = {}
    if metrics.is_file():
        for line in metrics.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # the last line of a killed job may be cut
                found |= {
                    name: value for name, value in json.loads(line).items() if name in ("loss", "validation_loss")
                }
    return found.get("loss"), found.get("validation_loss")


def _outcome(job: Job, code: int, last: str) -> Outcome:
    status = {0: "done", 2: "refused", PREEMPTED: "preempted", INTERRUPTED: "interrupted"}.get(code, "failed")
    if code < 0:
        status, last = "killed", f"killed by {signal.Signals(-code).name}{' (out of memory?)' if code == -9 else ''}"
    loss, validation_loss = final_losses(job.folder / "metrics.jsonl")
    error = "" if code == 0 else re.sub(r"^\d\d:\d\d:\d\d [A-Z]+ ", "", last)  # a log line without time and level
    return Outcome(job.number, job.overrides, str(job.folder), status, code, loss, validation_loss, error)


def _say(job: Job, text: str) -> None:
    print(f"[{job.number}] {text}", file=sys.stderr, flush=True)  # noqa: T201
