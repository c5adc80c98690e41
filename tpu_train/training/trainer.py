"""A run from its start to its end: what it begins with, the loop, what it leaves.

Key idea: everything that can be refused is, before the run folder is touched; from then on every end, a failure
included, leaves a folder that the same command goes on from. Several processes take the same way, each with its share
of the data; what is decided or written once is process 0's.
"""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from tpu_train.config.compose import Composed
from tpu_train.config.fields import duration_seconds
from tpu_train.config.problems import ConfigError, Problem, located, refused_at
from tpu_train.config.rules import global_batch_size, process_problems
from tpu_train.config.schema import Run
from tpu_train.data.stream import build_streams
from tpu_train.data.tokenizers import build_tokenizer
from tpu_train.execution.distributed import Processes, find_cluster, join
from tpu_train.execution.rendezvous import ProcessLost, RefusedElsewhere
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree
from tpu_train.training.checkpoints import Checkpoints, remove_leftovers
from tpu_train.training.console import console_logging, reporter
from tpu_train.training.engine import Engine
from tpu_train.training.failures import RunFailed
from tpu_train.training.initial_weights import initial_weights
from tpu_train.training.loggers import build_loggers
from tpu_train.training.loop import Loop, Parts, Streams
from tpu_train.training.resume import Start, cut_metrics, find_start
from tpu_train.training.run_folder import RunFolder, folder_of
from tpu_train.training.stopping import PREEMPTED, Stopper

log = logging.getLogger(__name__)


def train(composed: Composed) -> int:
    """Trains as configured, or goes on where the run folder's run ended.

    Returns:
        The exit code: 0; 1 after a non-finite step under `training.on_nan=stop` or where nothing could be saved; 75
        after a signal or `training.max_time`, with a checkpoint.

    Raises:
        ConfigError: what only opening the data, the devices or the run folder tells; nothing was started.
        RunFailed: anything else; the traceback is in the run folder's log.
    """
    with console_logging(composed.hydra.verbose) as console:
        try:
            with _placed(composed), refused_at("runtime.coordinator"):
                processes = join(find_cluster(composed.run.runtime, os.environ))
            console.of_process(processes.index)
            with processes, _placed(composed):
                return _train(composed, processes)
        except RefusedElsewhere as refused:
            raise ConfigError([Problem(refused.process, f"was refused: {refused.reason}")]) from refused
        except ProcessLost as lost:
            log.error("%s", lost)
            return 1


def _train(composed: Composed, processes: Processes) -> int:
    run = _with_processes(composed.run, processes)
    if problems := process_problems(run):  # that the environment tells of were not known to the rules
        raise ConfigError(problems)
    path = Path(processes.agree(str(folder_of(run, composed.choices["model"]))))
    checkpoints = Checkpoints(path, run.checkpoint.keep_last, run.checkpoint.keep_every, processes)
    command = composed.command(path)

    def end_at_once(reason: str, code: int) -> None:
        processes.end_others(reason, code)
        if processes.is_first:
            log.warning("go on with: %s", command)

    stopper = Stopper(_max_seconds(run), end_at_once)
    with stopper.listening():
        with refused_at("runtime"):
            runtime = Runtime(run.runtime.platform, run.runtime.devices)
        start = find_start(run, path, checkpoints, processes)
        if start.finished:
            log.info("%s is finished: it has a checkpoint of step %d", path, start.step)
            return 0
        code = _start(composed, _Given(run, runtime, processes, checkpoints, start, stopper))
    if code == PREEMPTED and processes.is_first:
        log.warning("stopped; go on with: %s", command)
    return code


@dataclasses.dataclass(frozen=True)
class _Given:
    """What a start was given, all of it before the run folder is touched."""

    run: Run
    runtime: Runtime
    processes: Processes
    checkpoints: Checkpoints
    start: Start
    stopper: Stopper


def _start(composed: Composed, given: _Given) -> int:
    run, start, processes, checkpoints = given.run, given.start, given.processes, given.checkpoints
    with refused_at("data"):
        streams = _open_data(run, start)
    with refused_at("checkpoint.init_from"):
        weights = initial_weights(run) if start.meta is None else None
    folder = RunFolder(checkpoints.run_folder, composed.run, processes.index)
    try:
        if processes.is_first:
            remove_leftovers(checkpoints.folder)
            cut_metrics(folder.metrics_path, start.step, run.validation.every)
            checkpoints.set_aside_after(start.step)
            _log_start(start, folder, composed.command(folder.path))
        processes.barrier("folder")
        _require_shared(folder.path, processes)
        engine = Engine(run, given.runtime)
        state = _state(engine, start, checkpoints, weights)
        return _train_in(folder, given, engine, Parts(state, streams, start, checkpoints, given.stopper))
    except ConfigError:
        raise
    except Exception as error:
        cause = processes.explained(error)
        if cause is not error:
            log.error("%s", cause)
        folder.log_traceback(error)
        raise RunFailed(cause, folder.log_path) from error
    finally:
        folder.close()


def _train_in(folder: RunFolder, given: _Given, engine: Engine, parts: Parts) -> int:
    run, is_first = given.run, given.processes.is_first
    loggers = build_loggers(run, folder, is_first=is_first)
    exit_code = 1
    try:
        with reporter(run.training.steps, run.training.log_every, is_first=is_first) as progress:
            exit_code = Loop(run, given.runtime, engine, loggers, progress, parts).run()
    except KeyboardInterrupt:
        log.warning("interrupted at step %d", loggers.last_step)
        raise
    finally:
        loggers.close(exit_code)
    return exit_code


def _state(engine: Engine, start: Start, checkpoints: Checkpoints, weights: Tree | None) -> Tree:
    if start.meta is not None:
        return engine.restore(checkpoints.path(start.step))
    return engine.initial_state() if weights is None else engine.state_from(engine.place(weights.__getitem__))


def _with_processes(run: Run, processes: Processes) -> Run:
    """The configuration that tells the processes, whoever found them: the global batch is counted by it."""
    if processes.count == 1:
        return run
    runtime = dataclasses.replace(run.runtime, num_processes=processes.count, process_id=processes.index)
    return dataclasses.replace(run, runtime=runtime)


def _require_shared(path: Path, processes: Processes) -> None:
    if not (path / "config.yaml").is_file():
        reason = (
            f"process {processes.index} of {processes.count} does not see {path}, made by process 0; choose a folder "
            "that all processes share"
        )
        raise ConfigError([Problem("run_dir", reason)])


def _log_start(start: Start, folder: RunFolder, command: str) -> None:
    log.info("run folder: %s; to go on with it: %s", folder.path, command)
    if start.meta is not None:
        log.info("going on after step %d", start.step)
    for change in start.changes:
        log.warning("changed since the checkpoint: %s", change)


@contextlib.contextmanager
def _placed(composed: Composed) -> Iterator[None]:
    """Problems of keys are placed where the keys were set."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([located(problem, composed.sources) for problem in error.problems]) from error


def _open_data(run: Run, start: Start) -> Streams:
    batch_size = global_batch_size(run)
    training, held_out = build_streams(
        run.data,
        build_tokenizer(run.tokenizer),
        seq_len=run.training.seq_len,
        batch_size=batch_size,
        seed=run.training.seed,
        vocab_size=run.model.vocab_size,
        steps=run.training.steps if start.meta is None else None,
    )
    first = 0
    if start.meta is not None:
        first = int(start.meta["data_position"])
        if start.meta["data_fingerprint"] not in (None, training.fingerprint):
            log.warning("the data or its order changed since the checkpoint; the new data begins at its start")
            first = 0
    return Streams(training, held_out, first)


def _max_seconds(run: Run) -> float | None:
    return None if run.training.max_time is None else duration_seconds(run.training.max_time)
