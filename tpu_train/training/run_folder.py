"""The folder of a run: its configuration, log, metrics and checkpoints."""

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

    Raises:
        ConfigError: it cannot be made or written to.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path = path
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(plain(dataclasses.replace(run, run_dir=str(self.path))), sort_keys=False)
            partial = self.path / "config.yaml.partial"
            partial.write_text(text, encoding="utf-8")
            partial.replace(self.path / "config.yaml")
            self._log = _LogFile(self.log_path, encoding="utf-8")
        except OSError as error:
            reason = f"cannot write to {self.path}: {error.strerror}; choose another folder"
            raise ConfigError([Problem("run_dir", reason)]) from error
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._log)

    @property
    def metrics_path(self) -> Path:
        """One line per step."""
        return self.path / "metrics.jsonl"

    @property
    def log_path(self) -> Path:
        """Everything logged, and the traceback of a failure."""
        return self.path / "log.txt"

    def log_traceback(self, error: BaseException) -> None:
        """Writes an error with its traceback to the log, and nowhere else."""
        trace = (type(error), error, error.__traceback__)
        self._log.handle(log.makeRecord(log.name, logging.ERROR, __file__, 0, "the run failed", (), trace))

    def close(self) -> None:
        """Ends the log."""
        logging.getLogger().removeHandler(self._log)
        self._log.close()


class _LogFile(logging.FileHandler):
    """A full disk loses log lines, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass
