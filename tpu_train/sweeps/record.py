"""`sweep.json` in a sweep's folder: what each job was and how it ended, for a rerun to go on from.

Key idea: the file is replaced as a whole after each job, and the folder is locked while a sweep runs in it.
"""

import contextlib
import fcntl
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tpu_train.config.problems import ConfigError, Problem

NAME = "sweep.json"


class Record:
    """The record of a sweep.

    Args:
        folder: of the sweep.
        overrides: of the sweep, as typed; a folder goes on with the same ones only.

    Raises:
        ConfigError: the folder holds a sweep of other overrides.
    """

    def __init__(self, folder: Path, overrides: Sequence[str]) -> None:
        self.folder = folder
        self._path = folder / NAME
        self._lock = threading.Lock()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._overrides = list(overrides)
        if self._path.exists():
            known = json.loads(self._path.read_text(encoding="utf-8"))
            if known["overrides"] != self._overrides:
                reason = f"{folder} holds a sweep of {' '.join(known['overrides'])}; choose another folder"
                raise ConfigError([Problem("hydra.sweep.dir", reason)])
            self._jobs = known["jobs"]

    def finished(self, number: int) -> dict[str, Any] | None:
        """How a job ended that is done, else None."""
        found = self._jobs.get(str(number))
        return found if found and found["exit_code"] == 0 else None

    def write(self, outcome: dict[str, Any]) -> None:
        """Records how a job ended."""
        with self._lock:
            self._jobs[str(outcome["number"])] = outcome
            partial = self._path.with_suffix(".partial")
            partial.write_text(json.dumps({"overrides": self._overrides, "jobs": self._jobs}, indent=1) + "\n")
            partial.replace(self._path)


@contextlib.contextmanager
def reserved(folder: str, given: bool) -> Iterator[Path]:
    """A sweep's folder, locked.

    Args:
        folder: the folder wanted.
        given: whether the user asked for just this one; else it must be new, and gets a number if it is not.

    Raises:
        ConfigError: it cannot be made, or another sweep runs in it.
    """
    path = Path(folder)
    try:
        if not given:
            path = _new(path)
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        reason = f"cannot write to {path}: {error.strerror}; choose another folder"
        raise ConfigError([Problem("hydra.sweep.dir", reason)]) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            reason = f"another sweep runs in {path}; choose another folder or wait for it"
            raise ConfigError([Problem("hydra.sweep.dir", reason)]) from error
        yield path


def _new(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for count in range(1, 10_000):
        candidate = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise FileExistsError(0, "too many sweeps of one name", str(path))
