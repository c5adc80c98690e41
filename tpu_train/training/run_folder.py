"""The folder of a run: its configuration, log, metrics and weights."""

import dataclasses
import datetime
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from tpu_train.config.convert import plain
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.schema import Run

log = logging.getLogger(__name__)


class RunFolder:
    """A new run folder, made with its `config.yaml` and a `log.txt` that everything logged goes to.

    Args:
        run: the configuration.
        model_name: the choice of `model`, part of the default name.

    Raises:
        ConfigError: the folder holds a run already, or cannot be made.
    """

    def __init__(self, run: Run, model_name: str) -> None:
        now = datetime.datetime.now().astimezone()
        self.path = Path(run.run_dir or f"runs/{now:%Y-%m-%d_%H-%M-%S}-{model_name}")
        if self.metrics_path.exists():
            raise ConfigError(
                [Problem("run_dir", f"{self.path} holds a run already; choose another folder or move that one away")]
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            text = yaml.safe_dump(plain(dataclasses.replace(run, run_dir=str(self.path))), sort_keys=False)
            (self.path / "config.yaml").write_text(text, encoding="utf-8")
        except OSError as error:
            reason = f"cannot write to {self.path}: {error.strerror}; choose another folder"
            raise ConfigError([Problem("run_dir", reason)]) from error
        self._log = logging.FileHandler(self.log_path, encoding="utf-8")
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

    def save_weights(self, step: int, params: Mapping[str, np.ndarray]) -> Path:
        """Writes `checkpoints/<step>/model.safetensors`, whole or not at all, and returns its path."""
        target = self.path / "checkpoints" / str(step) / "model.safetensors"
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        save_file({name: _to_torch(value) for name, value in params.items()}, partial)
        return partial.replace(target)

    def close(self) -> None:
        """Ends the log."""
        logging.getLogger().removeHandler(self._log)
        self._log.close()


def _to_torch(array: np.ndarray) -> torch.Tensor:
    # NumPy has no bfloat16 that torch would take; the bits are the same.
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))
