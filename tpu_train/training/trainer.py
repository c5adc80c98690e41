"""A run from its start to its end: what it begins with, the loop, what it leaves.

Key idea: everything that can be refused is, before the run folder is touched; from then on every end, a failure
included, leaves a folder that the same command goes on from.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from tpu_train.config.compose import Composed
from tpu_train.config.fields import duration_seconds
from tpu_train.config.problems import ConfigError, located, refused_at
from tpu_train.config.rules import global_batch_size
from tpu_train.config.schema import Run
from tpu_train.data.stream import build_streams
from tpu_train.data.tokenizers import build_tokenizer
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
    run = composed.run
    with console_logging(composed.hydra.verbose):
        path = folder_of(run, composed.choices["model"])
        checkpoints = Checkpoints(path, run.checkpoint.keep_last, run.checkpoint.keep_every)
        with _placed(composed):
            start = find_start(run, path, checkpoints)
        if start.finished:
            log.info("%s is finished: it has a checkpoint of step %d", path, start.step)
            return 0
        command = composed.command(path)
        stopper = Stopper(_max_seconds(run), lambda: log.warning("go on with: %s", command))
        with stopper.listening(), _placed(composed):
            code = _start(run, path, checkpoints, start, stopper, command)
        if code == PREEMPTED:
            log.warning("stopped; go on with: %s", command)
        return code


def _start(run: Run, path: Path, checkpoints: Checkpoints, start: Start, stopper: Stopper, command: str) -> int:
    with refused_at("runtime"):
        runtime = Runtime(run.runtime.platform, run.runtime.devices)
    with refused_at("data"):
        streams = _open_data(run, start)
    with refused_at("checkpoint.init_from"):
        weights = initial_weights(run) if start.meta is None else None
    folder = RunFolder(path, run)
    try:
        remove_leftovers(checkpoints.folder)
        cut_metrics(folder.metrics_path, start.step, run.validation.every)
        checkpoints.set_aside_after(start.step)
        _log_start(start, folder, command)
        engine = Engine(run, runtime)
        state = _state(engine, runtime, start, checkpoints, weights)
        return _train_in(folder, run, runtime, engine, Parts(state, streams, start, checkpoints, stopper))
    except ConfigError:
        raise
    except Exception as error:
        folder.log_traceback(error)
        raise RunFailed(error, folder.log_path) from error
    finally:
        folder.close()


def _train_in(folder: RunFolder, run: Run, runtime: Runtime, engine: Engine, parts: Parts) -> int:
    loggers = build_loggers(run, folder)
    exit_code = 1
    try:
        with reporter(run.training.steps, run.training.log_every) as progress:
            exit_code = Loop(run, runtime, engine, loggers, progress, parts).run()
    except KeyboardInterrupt:
        log.warning("interrupted at step %d", loggers.last_step)
        raise
    finally:
        loggers.close(exit_code)
    return exit_code


def _state(engine: Engine, runtime: Runtime, start: Start, checkpoints: Checkpoints, weights: Tree | None) -> Tree:
    if start.meta is not None:
        return runtime.restore(checkpoints.path(start.step), engine.state_spec())
    return engine.initial_state() if weights is None else engine.state_from(runtime.put(weights))


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
