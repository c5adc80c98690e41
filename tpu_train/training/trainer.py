"""The loop: batches in, steps started, metrics fetched late and written.

Key idea: the host runs one step ahead of the device. A step's metrics are fetched after the next step was started, so
the device never waits for the host to look at a number.
"""

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Iterator

from tpu_train.config.compose import Composed
from tpu_train.config.problems import ConfigError, Problem
from tpu_train.config.rules import global_batch_size
from tpu_train.config.schema import Run
from tpu_train.data.prefetch import Prefetch
from tpu_train.data.stream import PackedStream, TokenStream, build_streams
from tpu_train.data.tokenizers import build_tokenizer
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree
from tpu_train.objectives.flops import flops_per_token
from tpu_train.optim.schedules import schedule
from tpu_train.training.console import Reporter, console_logging, reporter
from tpu_train.training.engine import Engine
from tpu_train.training.failures import RunFailed
from tpu_train.training.loggers import Loggers, build_loggers
from tpu_train.training.metrics import Speedometer
from tpu_train.training.run_folder import RunFolder

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Started:
    """A step on its way: what the host knows of it, and its metrics on the device."""

    step: int
    lr: float
    data_wait_s: float
    metrics: Tree


def train(composed: Composed) -> int:
    """Trains as configured.

    Returns:
        The exit code: 0, or 1 after a non-finite step under `training.on_nan=stop`.

    Raises:
        ConfigError: what only opening the data, the devices or the run folder tells; nothing was started.
        RunFailed: anything else; the traceback is in the run folder's log.
    """
    run = composed.run
    with console_logging(composed.hydra.verbose):
        with _refused_at("runtime"):
            runtime = Runtime(run.runtime.platform, run.runtime.devices)
        with _refused_at("data"):
            data, held_out = _open_data(run)
        folder = RunFolder(run, composed.choices["model"])
        try:
            log.info("run folder: %s", folder.path)
            return _train_in(folder, run, runtime, data, held_out)
        except ConfigError:
            raise
        except Exception as error:
            folder.log_traceback(error)
            raise RunFailed(error, folder.log_path) from error
        finally:
            folder.close()


def _train_in(folder: RunFolder, run: Run, runtime: Runtime, data: TokenStream, held_out: PackedStream | None) -> int:
    loggers = build_loggers(run, folder)
    exit_code = 1
    try:
        with reporter(run.training.steps, run.training.log_every) as progress:
            exit_code = Trainer(run, runtime, loggers, progress).train(data, held_out, folder)
    except KeyboardInterrupt:
        log.warning("interrupted at step %d", loggers.last_step)
        raise
    finally:
        loggers.close(exit_code)
    return exit_code


@contextlib.contextmanager
def _refused_at(place: str) -> Iterator[None]:
    """What fails inside is a problem of the configuration: nothing was started."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ConfigError([Problem(place, str(error))]) from error


def _open_data(run: Run) -> tuple[TokenStream, PackedStream | None]:
    return build_streams(
        run.data,
        build_tokenizer(run.tokenizer),
        seq_len=run.training.seq_len,
        batch_size=global_batch_size(run),
        seed=run.training.seed,
        vocab_size=run.model.vocab_size,
    )


class Trainer:
    """One run of the loop.

    Args:
        run: the configuration.
        runtime: the devices.
        loggers: take each step's metrics line.
        progress: shows it.
    """

    def __init__(self, run: Run, runtime: Runtime, loggers: Loggers, progress: Reporter) -> None:
        self._run = run
        self._runtime = runtime
        self._loggers = loggers
        self._progress = progress
        self._engine = Engine(run, runtime)
        self._rate = schedule(run.schedule, run.optimizer.lr, run.training.steps)
        self._speed = Speedometer(
            flops_per_token(self._engine.model, run.training.seq_len), runtime.peak_flops(run.precision.compute)
        )
        self._batch_size = global_batch_size(run)
        self._tokens_per_step = self._batch_size * run.training.seq_len
        self._skipped = 0
        self._first_start = self._last_finish = 0.0

    def train(self, data: TokenStream, held_out: PackedStream | None, folder: RunFolder) -> int:
        """Runs every step, then the held-out loss; the last weights are in the run folder either way."""
        parameters = sum(p.numel() for p in self._engine.model.parameters())
        log.info("%s parameters, %s tokens a step", f"{parameters:,}", f"{self._tokens_per_step:,}")
        state = self._engine.initial_state()
        self._engine.compile_step(state, data.batch(0, self._batch_size))
        try:
            state = self._run_steps(state, data)
        except _Halted as halt:
            path = folder.save_weights(halt.step - 1, self._weights(halt.state))
            log.error(
                "step %d has a non-finite loss or gradient norm and training.on_nan is stop; the weights of step %d "
                "are in %s. training.on_nan=skip leaves such steps out.",
                halt.step, halt.step - 1, path,
            )  # fmt: skip
            return 1
        steps = self._run.training.steps
        if self._skipped:
            log.warning("%d of %d steps were skipped: non-finite loss or gradient norm", self._skipped, steps)
        self._validate(state, held_out)
        log.info("weights: %s", folder.save_weights(steps, self._weights(state)))
        return 0

    def _weights(self, state: Tree) -> Tree:
        """All that the model is made of, by full name, on the host."""
        return self._runtime.fetch({**state["params"], **state["frozen"], **state["buffers"]})

    def _run_steps(self, state: Tree, data: TokenStream) -> Tree:
        steps = self._run.training.steps
        started: deque[_Started] = deque()
        with Prefetch(data.batch(step, self._batch_size) for step in range(steps)) as batches:
            self._first_start = self._last_finish = time.perf_counter()
            for step, batch in enumerate(batches, start=1):
                lr = self._rate(step - 1)
                state, metrics = self._engine.step(state, batch, lr)
                started.append(_Started(step, lr, batches.data_wait_s, metrics))
                if len(started) > 1:
                    self._finish(started.popleft(), state)
        while started:
            self._finish(started.popleft(), state)
        return state

    def _finish(self, started: _Started, state: Tree) -> None:
        """Waits for a step's metrics and writes its line."""
        metrics = self._runtime.fetch(started.metrics)
        now = time.perf_counter()
        seconds, self._last_finish = now - self._last_finish, now
        finite = bool(metrics.pop("finite"))
        self._skipped += not finite
        memory = self._runtime.peak_memory()
        record = {
            "step": started.step,
            "loss": float(metrics["loss"]),
            "lr": started.lr,
            "grad_norm": float(metrics["grad_norm"]),
            "tokens": self._tokens_per_step,
            "step_time_s": seconds,
            "data_wait_s": started.data_wait_s,
            **self._speed.rates(self._tokens_per_step, seconds),
            "peak_memory_bytes": memory.num_bytes,
            "peak_memory_source": memory.source,
            "compile_count": self._engine.train_step.compile_count,
            "skipped_steps": self._skipped,
            **{name: float(value) for name, value in metrics.items() if name not in ("loss", "grad_norm", "weight")},
        }
        self._loggers.write(record)
        if not finite:
            if self._run.training.on_nan == "stop":
                raise _Halted(started.step, state)
            log.warning("step %d skipped: non-finite loss or gradient norm", started.step)
        seconds_left = (now - self._first_start) / started.step * (self._run.training.steps - started.step)
        self._progress.step(record, seconds_left)

    def _validate(self, state: Tree, held_out: PackedStream | None) -> None:
        if held_out is None or self._run.validation.steps == 0:
            return
        total = weight = 0.0
        for i in range(min(self._run.validation.steps, held_out.num_blocks // self._batch_size)):
            sums = self._engine.held_out_sums(state, held_out.batch(i, self._batch_size))
            total, weight = total + sums[0], weight + sums[1]
        loss = total / weight
        log.info("held-out loss %.4f nats per token", loss)
        self._loggers.write({"step": self._run.training.steps, "validation_loss": loss})


class _Halted(Exception):
    """A non-finite step under `on_nan=stop`, with the state, whose weights are those before that step."""

    def __init__(self, step: int, state: Tree) -> None:
        super().__init__(step)
        self.step = step
        self.state = state
