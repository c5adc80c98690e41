"""The folder of a run: its configuration, log, metrics and checkpoints.

Key idea: of several processes the first one writes; of another one there is a file only where it failed.
"""

import contextlib
import dataclasses
import datetime
import logging
from pathlib import Path

import yaml

from tpu_train.config.convert import plain
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import Run

log = logging.getLogger(__name__)


def folder_of(run: Run, model_name: str) -> Path:
    """The run folder that a configuration asks for; without `run_dir` one named by the time.

    Args:
        run: the configuration.
        model_name: the choice of `model`, part of the default name.
    """
    now = datetime.datetime.now().astimezone()
    return Path(run.run_dir or f"runs/{now:%Y-%m-%d_%H-%M-%S}-{model_name}")


class RunFolder:
    """A run folder, made if it is not there, with a `log.txt` that everything logged goes to.

    Args:
        path: the folder.
        run: the configuration, written to `config.yaml`.
        process: number of this process; others than 0 make and log nothing.

    Raises:
        ConfigError: it cannot be made or written to.
    """

    def __init__(self, path: Path, run: Run, process: int = 0) -> None:
        self.path = path
        self._process = process
        self._log: _LogFile | None = None
        if process == 0:
            self._make(run)

    def _make(self, run: Run) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(plain(dataclasses.replace(run, run_dir=str(self.path))), sort_keys=False)
            partial = self.path / "config.yaml.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path / "config.yaml")
            self._log = _open_log(self.log_path)
        except OSError as error:
            reason = f"cannot write to {self.path}: {error.strerror}; choose another folder"
            raise ConfigError([Problem("run_dir", reason)]) from error
        logging.getLogger().addHandler(self._log)

    @property
    def metrics_path(self) -> Path:
        """One line per step."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """Everything logged, and the traceback of a failure; of a process that is not the first, only that."""
        return self.path / (f"log-process-{self._process}.txt" if self._process else "log.txt")

    def log_traceback(self, error: BaseException) -> None:
        """Writes an error with its traceback to the log, and nowhere else."""
        trace = (type(error), error, error.__traceback__)
        record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "the run failed", (), trace)
        if self._log is not None:
            self._log.handle(record)
            return
        with contextlib.suppress(OSError):
            file = _open_log(self.log_path)
            file.handle(record)
            file.close()

    def close(self) -> None:
        """Ends the log."""
        if self._log is not None:
            logging.getLogger().removeHandler(self._log)
            self._log.close()


def _open_log(path: Path) -> "_LogFile":
    file = _LogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return file


class _LogFile(logging.FileHandler):
    """A full disk loses log lines, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
