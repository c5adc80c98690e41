"""`hydra/launcher=process`: Hydra hands the jobs of a sweep to the program's own runner.

It stands in this namespace because Hydra takes plugins from nowhere else, and imports nothing but Hydra because Hydra
imports it at every start. Key idea: Hydra passes a launcher one object of the program's, the task function; ours has
a method `launch` that takes whole batches (`tpu_train.sweeps.task.Task`).
"""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# A plain mapping: its keys are judged against tpu_train.config.hydra_settings.ProcessLauncherConfig.
ConfigStore.instance().store(
    group="hydra/launcher",
    name="process",
    node={"_target_": "hydra_plugins.tpu_train.ProcessLauncher", "n_jobs": 1},
    provider="tpu-train",
)


class ProcessLauncher(Launcher):
    """Runs each job as a process of its own.

    Args:
        n_jobs: jobs side by side.
    """

    def __init__(self, n_jobs: int) -> None:
        self._num_side_by_side = int(n_jobs)
        self._task: Any = None
        self._config: DictConfig | None = None
        self._context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before any job.

        Raises:
            ValueError: the program is another one.
        """
        if not hasattr(task_function, "launch"):
            raise ValueError("hydra/launcher=process runs jobs of tpu-train only; choose another launcher")
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of jobs."""
        assert self._context is not None
        loader = self._context.config_loader
        return self._task.launch(loader, self._config, job_overrides, initial_job_idx, self._num_side_by_side)
