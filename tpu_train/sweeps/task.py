"""What Hydra calls the task function: takes the jobs that a sweeper makes and runs them as processes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, open_dict

from tpu_train.config.hydra_settings import inside
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.sweeps.jobs import Job, Outcome, Runner
from tpu_train.sweeps.record import Record


class SweepStopped(Exception):
    """A job was preempted or the user interrupted; the sweeper must make no more jobs."""


class JobFailed(Exception):
    """A job failed, for a sweeper that reads results."""


class Task:
    """Runs jobs in processes; our launcher hands it whole batches, other launchers call it once per job.

    Args:
        runner: of the sweep.
        reads_results: whether the sweeper chooses jobs by the results of earlier ones.
    """

    def __init__(self, runner: Runner, reads_results: bool) -> None:
        self.runner = runner
        self.reads_results = reads_results
        self._folders = set[Path]()

    def __call__(self, _: DictConfig) -> float | None:
        """One job, for launchers other than ours.

        Raises:
            JobFailed: it failed.
        """
        config = HydraConfig.get()
        job = Job(config.job.num, _as_typed(config.overrides.task), Path(config.runtime.output_dir))
        (outcome,) = self.runner.run([job], 1)
        if outcome.exit_code != 0 and self.reads_results:
            raise JobFailed(outcome.error)
        return outcome.objective

    def launch(
        self,
        loader: ConfigLoader,
        config: DictConfig,
        job_overrides: Sequence[Sequence[str]],
        first_number: int,
        num_side_by_side: int,
    ) -> list[JobReturn]:
        """A batch of jobs, for our launcher.

        Args:
            loader: Hydra's.
            config: of the whole sweep.
            job_overrides: each job's words.
            first_number: of the batch's jobs.
            num_side_by_side: jobs at a time.

        Raises:
            ConfigError: two jobs have one folder or one outside of the sweep's, or a finished job of an earlier start
                had other overrides.
            SweepStopped: no more jobs are to be made.
        """
        setup_globals()
        jobs = [
            Job(number, _as_typed(words), _folder(loader, config, number, words))
            for number, words in enumerate(job_overrides, start=first_number)
        ]
        self._refuse_folders(jobs)
        _refuse_other_overrides(jobs, self.runner.record)
        outcomes = self.runner.run(jobs, num_side_by_side)
        if self.runner.stopped:
            raise SweepStopped
        return [self._returned(outcome) for outcome in outcomes]

    def _refuse_folders(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if not inside(os.path.relpath(job.folder, self.runner.record.folder)):
                reason = f"job {job.number} has the folder {job.folder}, which is not inside of the sweep's"
                raise ConfigError([Problem("hydra.sweep.subdir", reason)])
            if job.folder in self._folders:
                reason = f"jobs of this sweep share the folder {job.folder}; let it depend on hydra.job.num"
                raise ConfigError([Problem("hydra.sweep.subdir", reason)])
            self._folders.add(job.folder)

    def _returned(self, outcome: Outcome) -> JobReturn:
        failed = outcome.exit_code != 0 and self.reads_results
        value: Any = JobFailed(f"job {outcome.number}: {outcome.error}") if failed else outcome.objective
        status = JobStatus.FAILED if failed else JobStatus.COMPLETED
        return JobReturn(overrides=outcome.overrides, working_dir=outcome.folder, status=status, _return_value=value)


def _folder(loader: ConfigLoader, config: DictConfig, number: int, overrides: Sequence[str]) -> Path:
    job = loader.load_sweep_config(config, list(overrides))
    with open_dict(job):
        job.hydra.job.id = job.hydra.job.num = number
    HydraConfig.instance().set_config(job)  # ${hydra:job.num} reads from there
    return Path(config.hydra.sweep.dir) / str(job.hydra.sweep.subdir)


def _as_typed(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(word.lstrip("+") for word in overrides)


def _refuse_other_overrides(jobs: Sequence[Job], record: Record) -> None:
    for job in jobs:
        earlier = record.finished(job.number)
        if earlier and tuple(earlier["overrides"]) != job.overrides:
            reason = (
                f"job {job.number} in {record.folder} was {' '.join(earlier['overrides'])} and is now "
                f"{' '.join(job.overrides)}; a sweeper that draws needs a fixed seed to go on, or choose another folder"
            )
            raise ConfigError([Problem("hydra.sweep.dir", reason)])
