"""A whole sweep: judged, run by Hydra's multirun, and summed up in a table."""

import contextlib
import dataclasses
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tpu_train.config.hydra_frame import ERRORS, PRIMARY, hydra_on, reason
from tpu_train.config.overrides import quoted
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.sweeps.jobs import INTERRUPTED, PREEMPTED, Outcome, Runner
from tpu_train.sweeps.plan import Plan, plan
from tpu_train.sweeps.record import Record, reserved
from tpu_train.sweeps.task import JobFailed, SweepStopped, Task

_NO_TERMINAL = 10_000  # columns; a table is only as wide as its rows


@dataclasses.dataclass(frozen=True)
class Result:
    """How a sweep ended.

    Attributes:
        exit_code: 0 all done, 1 some failed, 75 stopped by a preempted job, 130 interrupted.
        folder: of the sweep.
        outcomes: of the jobs, in order.
    """

    exit_code: int
    folder: Path
    outcomes: tuple[Outcome, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        jobs = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        return {"exit_code": self.exit_code, "sweep_dir": str(self.folder), "jobs": jobs}

    def table(self) -> Table:
        """One row a job, with the overrides that tell it from the others."""
        shared = set[str]()
        if len(self.outcomes) > 1:
            shared = set.intersection(*(set(outcome.overrides) for outcome in self.outcomes))
        table = Table(title=f"sweep {self.folder}", title_justify="left")
        for name in ("job", "status", "final loss", "held-out loss", "overrides", "error"):
            table.add_column(name, overflow="fold")
        for outcome in self.outcomes:
            losses = ["" if loss is None else f"{loss:.4f}" for loss in (outcome.loss, outcome.validation_loss)]
            own = " ".join(word for word in outcome.overrides if word not in shared)
            table.add_row(str(outcome.number), outcome.status, *losses, escape(own), escape(outcome.error))
        return table


def sweep(overrides: Sequence[str], config_dir: Path | None) -> Result:
    """Run a sweep.

    Args:
        overrides: command-line words.
        config_dir: a folder of the user's own YAML.

    Raises:
        ConfigError: nothing was started.
    """
    planned = plan(overrides, config_dir)
    settings = planned.composed.hydra
    typed = [word for word in overrides if not word.lstrip("+").startswith("hydra.sweep.dir=")]
    # How many jobs run side by side, and by what, may change when it goes on.
    sweep_words = [word for word in typed if not word.lstrip("+").startswith(("hydra.launcher.", "hydra/launcher="))]
    with reserved(settings.sweep_dir, settings.sweep_dir_given) as folder:
        again = shlex.join(
            ["tpu-train", *typed, "-m", f"hydra.sweep.dir={quoted(str(folder))}", *_arguments(config_dir)]
        )
        _say(f"sweep folder {folder}; to go on with it after a stop: {again}")
        runner = Runner(Record(folder, sweep_words, config_dir), [*planned.job_words, *_arguments(config_dir)])
        with _passing_signals_on(runner):
            _multirun(planned, Task(runner, reads_results=not settings.enumerates), folder, config_dir)
    outcomes = tuple(sorted(runner.outcomes, key=lambda outcome: outcome.number))
    codes = [outcome.exit_code for outcome in outcomes]
    if runner.stopped:
        _say(f"stopped; go on with: {again}")
    code = PREEMPTED if PREEMPTED in codes else INTERRUPTED if runner.interrupted else int(any(codes))
    return Result(code, folder, outcomes)


def _multirun(planned: Plan, task: Task, folder: Path, config_dir: Path | None) -> None:
    words = [*planned.words, f"++hydra.sweep.dir={quoted(str(folder))}"]
    with hydra_on(config_dir and config_dir.resolve()), contextlib.suppress(SweepStopped, JobFailed):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            hydra.multirun(PRIMARY, task, words, with_log_configuration=False)
        except (*ERRORS, ImportError, RuntimeError) as error:
            if isinstance(error, ConfigError) or task.runner.outcomes:
                raise
            raise ConfigError([Problem("sweep", reason(error))]) from error


@contextlib.contextmanager
def _passing_signals_on(runner: Runner) -> Iterator[None]:
    """What ends a run is passed on to the jobs, which save a checkpoint and exit as preempted; twice, at once."""
    # When the terminal closes the jobs stay, being in sessions of their own.
    passed_on = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}
    before = {number: signal.getsignal(number) for number in passed_on}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # by nohup, or in the background of a shell
            signal.signal(number, lambda number, _: runner.signal(passed_on[signal.Signals(number)]))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _arguments(config_dir: Path | None) -> list[str]:
    return ["--config-dir", str(config_dir)] if config_dir else []


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def print_table(result: Result) -> None:
    """Prints the table on stdout, as wide as the terminal; where there is none, a job is a line however long."""
    console = Console(width=None if sys.stdout.isatty() else _NO_TERMINAL)
    console.print(result.table())
