"""Where a run's metrics go: `metrics.jsonl` for certain, other loggers as long as they work.

Key idea: the file is the record of a run, so its failure is the run's; any other logger that fails is reported once and
left out.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tpu_train.config.convert import plain
from tpu_train.config.schema import Run
from tpu_train.training.metrics import MetricsFile
from tpu_train.training.run_folder import RunFolder
from tpu_train.training.tensorboard_logger import TensorBoardLogger
from tpu_train.training.wandb_logger import WandbLogger, resolve_mode

log = logging.getLogger(__name__)


class Logger(Protocol):
    """Shows metrics somewhere. Whatever it raises, the run goes on without it."""

    name: str

    def log(self, record: dict[str, Any]) -> None:
        """Takes one metrics line; must not wait for a network."""
        ...

    def close(self, exit_code: int) -> None:
        """Ends, in bounded time; `exit_code` is that of the run."""
        ...


class Loggers:
    """All loggers of a run, as one.

    Args:
        file: gets every line; None in a process that is not the first.
        others: make the other loggers, by name; they get a line every `log_every` steps, that of the first and the
            last step, and validation.
        log_every: steps.
        steps: of the whole run.
    """

    def __init__(
        self, file: MetricsFile | None, others: Sequence[tuple[str, Callable[[], Logger]]], log_every: int, steps: int
    ) -> None:
        self._file = file
        self._log_every = log_every
        self._steps = steps
        self._opened: list[Logger] = []
        self.last_step = 0
        for name, make in others:
            try:
                self._opened.append(make())
            except Exception as error:
                log.warning("%s is off: %s: %s", name, type(error).__name__, error)
        self._working = list(self._opened)

    def write(self, record: dict[str, Any]) -> None:
        """Takes a metrics line."""
        if self._file is not None:
            self._file.write(record)
        self.last_step = step = record["step"]
        if step % self._log_every == 0 or step in (1, self._steps) or "validation_loss" in record:
            for logger in tuple(self._working):
                try:
                    logger.log(record)
                except Exception as error:
                    log.warning("%s is off from step %d on: %s: %s", logger.name, step, type(error).__name__, error)
                    self._working.remove(logger)

    def close(self, exit_code: int) -> None:
        """Ends all."""
        if self._file is not None:
            self._file.close()
        for logger in self._opened:
            try:
                logger.close(exit_code)
            except Exception as error:
                log.warning("%s did not finish: %s: %s", logger.name, type(error).__name__, error)


def build_loggers(run: Run, folder: RunFolder, *, is_first: bool = True) -> Loggers:
    """The loggers of a configuration; none in a process that is not the first."""
    if not is_first:
        return Loggers(None, (), run.training.log_every, run.training.steps)
    config = {**plain(run), "metadata": plain(run.logging)["metadata"]}
    others: list[tuple[str, Callable[[], Logger]]] = []
    mode = resolve_mode(run.logging.wandb.mode, os.environ)
    if mode != "disabled":
        others.append(("wandb", lambda: WandbLogger(run.logging.wandb, mode, folder.path, config)))
    if run.logging.tensorboard.enabled:
        others.append(("TensorBoard", lambda: TensorBoardLogger(folder.path / "tensorboard", config)))
    return Loggers(MetricsFile(folder.metrics_path), others, run.training.log_every, run.training.steps)
