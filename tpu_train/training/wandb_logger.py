"""Metrics to Weights & Biases. A logger that fails is reported once and never stops a run."""

import logging
import os
from pathlib import Path
from typing import Any

from tpu_train.config.schema import Wandb

log = logging.getLogger(__name__)

START_LIMIT_SECONDS = 20


class WandbLogger:
    """One wandb run, kept in the run folder.

    Args:
        config: `logging.wandb`.
        folder: the run folder; wandb's files go to `wandb/` below it.
        run_config: the whole configuration, shown on the run's page.
    """

    def __init__(self, config: Wandb, folder: Path, run_config: dict[str, Any]) -> None:
        self._run: Any = None
        mode = _resolve_mode(config.mode)
        if mode == "disabled":
            return
        import wandb

        try:
            self._run = wandb.init(
                project=config.project,
                name=folder.name,
                dir=folder,
                mode=mode,
                config=run_config,
                settings=wandb.Settings(silent=True, init_timeout=START_LIMIT_SECONDS, x_disable_stats=True),
            )
        except Exception as error:  # wandb raises many kinds; none may stop a run
            log.warning("wandb is off: %s", error)

    def log(self, record: dict[str, Any]) -> None:
        """Sends one metrics line under its step."""
        if self._run is None:
            return
        values = {name: value for name, value in record.items() if name != "step"}
        try:
            self._run.log(values, step=record["step"])
        except Exception as error:
            log.warning("wandb is off from step %s on: %s", record["step"], error)
            self._run = None

    def close(self) -> None:
        """Ends the wandb run."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            log.warning("wandb did not finish: %s", error)


def _resolve_mode(mode: str) -> Any:
    if mode != "auto":
        return mode
    # WANDB_MODE is the user's own word; a key means that they have an account to log to.
    return os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
