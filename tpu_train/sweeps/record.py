"""`sweep.json` in a sweep's folder: what each job was and how it ended, for a rerun to go on from.

Key idea: the file is replaced as a whole after each job, and the folder is locked while a sweep runs in it.
"""

import contextlib
import fcntl
import json
import os
import shutil
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
        config_dir: the user's folder of YAML; likewise.

    Raises:
        ConfigError: the folder holds a sweep of other overrides, or a record that cannot be read.
    """

    def __init__(self, folder: Path, overrides: Sequence[str], config_dir: Path | None = None) -> None:
        self.folder = folder
        self._path = folder / NAME
        self._lock = threading.Lock()
        self._jobs: dict[str, dict[str, Any]] = {}
        self._sweep = {"overrides": list(overrides), "config_dir": config_dir and str(config_dir.resolve())}
        if self._path.exists():
            known, self._jobs = _read(self._path)
            if known != self._sweep:
                words = [*known["overrides"], *(["--config-dir", known["config_dir"]] if known["config_dir"] else [])]
                reason = f"{folder} holds a sweep of {' '.join(words)}; choose another folder"
                raise ConfigError([Problem("hydra.sweep.dir", reason)])
        self._write()

    def finished(self, number: int) -> dict[str, Any] | None:
        """How a job ended that is done, else None."""
        found = self._jobs.get(str(number))
        return found if found and found["exit_code"] == 0 else None

    def write(self, outcome: dict[str, Any]) -> None:
        """Records how a job ended."""
        with self._lock:
            self._jobs[str(outcome["number"])] = outcome
            self._write()

    def _write(self) -> None:
        partial = self._path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as stream:
            json.dump({**self._sweep, "jobs": self._jobs}, stream, indent=1)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self._path)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """What a record says of its sweep, and of the jobs by number."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        sweep = {"overrides": [str(word) for word in found["overrides"]], "config_dir": found.get("config_dir")}
        jobs = {str(number): {**job, "exit_code": job["exit_code"]} for number, job in found["jobs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"is damaged ({type(error).__name__}); remove it to run all jobs anew, or choose another folder"
        raise ConfigError([Problem(str(path), reason)]) from error
    return sweep, jobs


@contextlib.contextmanager
def reserved(folder: str, given: bool) -> Iterator[Path]:
    """A sweep's folder, locked; removed where it is refused while nothing but a record is in it.

    Args:
        folder: the folder wanted.
        given: whether the user asked for just this one; else it must be new, and gets a number if it is not.

    Raises:
        ConfigError: it cannot be made, or another sweep runs in it.
    """
    path = Path(folder)
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        if not given:
            path = _new(path)
            missing = [path, *missing[1:]]
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
        try:
            yield path
        except ConfigError:
            if path in missing and not any(entry.is_dir() for entry in path.iterdir()):  # no job began
                shutil.rmtree(path)
                with contextlib.suppress(OSError):  # another sweep is in it
                    for parent in missing[1:]:
                        parent.rmdir()
            raise


def _new(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for count in range(1, 10_000):
        candidate = path if count == 1 else path.with_name(f"{path.name}-{count}")
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise FileExistsError(0, "too many sweeps of one name", str(path))
