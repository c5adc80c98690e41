"""The checkpoints of a run folder: which there are, which are whole, which are kept.

Key idea: a checkpoint counts from the moment that its list of files, with sizes and checksums, is written beside them;
whatever a crash leaves behind lacks it or does not agree with it, and is passed over. With several processes each one
writes its shards, process 0 writes the list when all have, and a save that fails in one has failed in all.
"""

import contextlib
import json
import logging
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpu_train.config.convert import plain
from tpu_train.config.schema import Run
from tpu_train.execution.checkpoint_io import CheckpointWriter, read_meta
from tpu_train.execution.distributed import Processes
from tpu_train.graph.capture import Tree

log = logging.getLogger(__name__)

FILES = "files.json"
_CHUNK_BYTES = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint that is not there or not whole; the message names the file."""


class Checkpoints:
    """The checkpoints below `checkpoints/` of a run folder.

    Args:
        run_folder: of the run.
        keep_last: newest checkpoints to keep.
        keep_every: those of steps that this divides are kept besides.
        processes: of the run; `save` and `wait` are called by all of them, at the same step.
    """

    def __init__(
        self,
        run_folder: Path,
        keep_last: int = 1,
        keep_every: int | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.run_folder = run_folder
        self.folder = (run_folder / "checkpoints").absolute()
        self._keep_last, self._keep_every = keep_last, keep_every
        self._processes = Processes() if processes is None else processes
        self._writer = CheckpointWriter()
        self._finishing: threading.Thread | None = None
        self._error: BaseException | None = None

    def steps(self) -> list[int]:
        """Steps that have a whole checkpoint by the look of it; contents are judged by `check`."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        found = [int(name) for name in names if name.isdecimal() and (self.folder / name / FILES).is_file()]
        return sorted(found)

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return self.folder / str(step)

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved with the arrays."""
        return read_meta(self.path(step))

    def check(self, step: int) -> None:
        """Compares every file with the list.

        Raises:
            CheckpointError: a file is missing, shorter, or has other contents.
        """
        folder = self.path(step)
        try:
            listed = json.loads((folder / FILES).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder / FILES}: cannot be read: {error}") from error
        for name, (size, checksum) in listed.items():
            file = folder / name
            if not file.is_file():
                raise CheckpointError(f"{file}: is missing")
            if file.stat().st_size != size:
                raise CheckpointError(f"{file}: has {file.stat().st_size} bytes, {size} were written")
            if _checksum(file) != checksum:
                raise CheckpointError(f"{file}: its contents are not what was written")

    def require(self, step: int) -> int:
        """The step that was asked for.

        Raises:
            CheckpointError: it is not there, with those that are, or not whole.
        """
        steps = self.steps()
        if step not in steps:
            there = f"those there are: {', '.join(map(str, steps))}" if steps else "there is none"
            raise CheckpointError(f"{self.run_folder} has no checkpoint of step {step}; {there}")
        try:
            self.check(step)
        except CheckpointError as error:
            raise CheckpointError(f"step {step} cannot be used: {error}") from error
        return step

    def newest_whole(self) -> int | None:
        """The newest step whose files agree with their list; what is passed over is logged."""
        for step in reversed(self.steps()):
            try:
                self.check(step)
            except CheckpointError as error:
                log.warning("the checkpoint of step %d is passed over: %s", step, error)
            else:
                return step
        return None

    def save(self, step: int, state: Tree, meta: Mapping[str, Any]) -> None:
        """Begins to save; returns when the state may be overwritten.

        Raises:
            Exception: this or the save before failed.
        """
        self.wait()
        path = self.path(step)
        self._together("clear", lambda: self._clear(path))  # no process writes into what another removes
        self._together("start", lambda: self._writer.start(path, state, meta))
        self._finishing = threading.Thread(target=self._finish, args=(path,), name="checkpoint", daemon=True)
        self._finishing.start()

    def wait(self) -> None:
        """Waits for the save under way.

        Raises:
            Exception: it failed.
        """
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def set_aside_after(self, step: int) -> None:
        """Renames checkpoints later than a step that a run goes on from: they belong to another history."""
        for later in [found for found in self.steps() if found > step]:
            target = _free(self.folder, f"{later}-replaced")
            self.path(later).rename(target)
            log.info("the checkpoint of step %d is now %s", later, target)

    def _finish(self, path: Path) -> None:
        try:
            self._together("write", self._writer.wait)
            self._together("list", lambda: self._list(path))
        except BaseException as error:
            self._error = error

    def _together(self, name: str, action: Callable[[], None]) -> None:
        """Does a part of a save in every process; all of them raise if one fails.

        Raises:
            Exception: this process's own error, or a `CheckpointError` with another's.
        """
        own: Exception | None = None
        try:
            action()
        except Exception as error:
            own = error
        reason = None if own is None else one_line(own)
        failures = self._processes.failures(reason, f"checkpoint/{name}")
        if own is not None:
            raise own
        if failures:
            raise CheckpointError("; ".join(f"process {index}: {text}" for index, text in sorted(failures.items())))

    def _clear(self, path: Path) -> None:
        """Removes what a crash left, or a step that is done again after a resume from an earlier one."""
        if self._processes.is_first and path.exists():
            shutil.rmtree(path)

    def _list(self, path: Path) -> None:
        if self._processes.is_first:
            _write_list(path)
            self._prune()

    def _prune(self) -> None:
        steps = self.steps()
        for step in steps[: -self._keep_last]:
            if not (self._keep_every and step % self._keep_every == 0):
                # Without its list it no longer counts, should the removal be cut short.
                (self.path(step) / FILES).unlink(missing_ok=True)
                shutil.rmtree(self.path(step), ignore_errors=True)


def checkpoint_meta(
    run: Run, step: int, data_position: int, data_fingerprint: str | None, skipped_steps: int
) -> dict[str, Any]:
    """What is saved with the arrays: all that going on needs to know.

    Args:
        run: the configuration, schedule included.
        step: that is done.
        data_position: the first sequence that was not read.
        data_fingerprint: of the stream; None before there is one.
        skipped_steps: so far.
    """
    return {
        "step": step,
        "data_position": data_position,
        "data_fingerprint": data_fingerprint,
        "skipped_steps": skipped_steps,
        "num_cores": num_cores(),
        "config": plain(run),
    }


def num_cores() -> int:
    """Cores that this process may use; XLA's sums on the CPU are split by it."""
    return len(os.sched_getaffinity(0))


def attempt(action: Callable[[], None]) -> str | None:
    """Does what may fail for the disk's sake; the reason in one line if it did."""
    try:
        action()
    except Exception as error:  # Orbax wraps the system's errors in many kinds
        return one_line(error)
    return None


def one_line(error: Exception) -> str:
    """An error's type and message, cut to a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _write_list(folder: Path) -> None:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    listed = {file.relative_to(folder).as_posix(): [file.stat().st_size, _checksum(file)] for file in files}
    partial = folder / f"{FILES}.partial"
    partial.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / FILES)


def _checksum(file: Path) -> int:
    value = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def _free(folder: Path, name: str) -> Path:
    candidate, count = folder / name, 1
    while candidate.exists():
        count += 1
        candidate = folder / f"{name}-{count}"
    return candidate


def remove_leftovers(folder: Path) -> None:
    """Removes what an interrupted save left: folders under Orbax's temporary names, and ones without a list."""
    for path in folder.iterdir() if folder.is_dir() else ():
        unfinished = path.name.isdecimal() and not (path / FILES).is_file()
        if unfinished or ".orbax-checkpoint-tmp" in path.name:
            with contextlib.suppress(OSError):
                shutil.rmtree(path)
