"""What can be wrong with the loggers, found before anything starts."""

import importlib.util

from tpu_train.config.problems import Problem
from tpu_train.config.schema import Run


def rules(run: Run) -> list[Problem]:
    """Problems of logging, placed by dotted key."""
    if not run.logging.tensorboard.enabled or importlib.util.find_spec("tensorboard"):
        return []
    message = "true needs a package that is not installed; pip install 'tpu-train[tensorboard]', or leave it false"
    return [Problem("logging.tensorboard.enabled", message)]
