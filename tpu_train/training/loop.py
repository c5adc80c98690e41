"""The loop: batches in, steps started, metrics fetched late and written, checkpoints in between.

Key idea: the host runs one step ahead of the device. A step's metrics are fetched after the next step was started, so
the device never waits for the host to look at a number. Only before validation, a checkpoint and the end is the step
under way waited for: what is saved has metrics that have been seen.
"""

import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from tpu_train.config.fields import duration_seconds
from tpu_train.config.rules import global_batch_size
from tpu_train.config.schema import Run
from tpu_train.data.loader import Loader
from tpu_train.data.stream import PackedStream, TokenStream
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import Tree
from tpu_train.graph.step import NOTHING, SAVE, STOP
from tpu_train.objectives.flops import flops_per_token
from tpu_train.optim.schedules import schedule
from tpu_train.training.checkpoints import Checkpoints, attempt, checkpoint_meta, num_cores
from tpu_train.training.console import Reporter
from tpu_train.training.engine import Engine
from tpu_train.training.loggers import Loggers
from tpu_train.training.metrics import Speedometer
from tpu_train.training.resume import Start
from tpu_train.training.saved_run import SHAPES
from tpu_train.training.stopping import PREEMPTED, Stopper

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Streams:
    """The data of a run.

    Attributes:
        training: what is trained on.
        held_out: what is validated on; None for none.
        first: sequence of `training` that this start begins with.
    """

    training: TokenStream
    held_out: PackedStream | None
    first: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a start of a run goes on from and reports to.

    Attributes:
        state: on the devices.
        streams: the data.
        start: steps that are done.
        checkpoints: of the run folder.
        stopper: tells when to end early.
    """

    state: Tree
    streams: Streams
    start: Start
    checkpoints: Checkpoints
    stopper: Stopper


@dataclasses.dataclass(frozen=True)
class _Started:
    """A step on its way: what the host knows of it, and its metrics on the device."""

    step: int
    lr: float
    data_wait_s: float
    metrics: Tree


class SaveFailed(Exception):
    """A checkpoint could not be written and the run is to end for it."""


class Loop:
    """One start of a run.

    Args:
        run: the configuration.
        runtime: the devices.
        engine: the programs.
        loggers: take each step's metrics line.
        progress: shows it.
        parts: what it goes on from and reports to.
    """

    def __init__(
        self, run: Run, runtime: Runtime, engine: Engine, loggers: Loggers, progress: Reporter, parts: Parts
    ) -> None:
        self._run = run
        self._runtime = runtime
        self._engine = engine
        self._loggers = loggers
        self._progress = progress
        self._state, self._streams, self._start = parts.state, parts.streams, parts.start
        self._checkpoints, self._stopper = parts.checkpoints, parts.stopper
        self._rate = schedule(run.schedule, run.optimizer.lr, run.training.steps)
        self._speed = Speedometer(
            flops_per_token(engine.model, run.training.seq_len),
            runtime.peak_flops(run.precision.compute),
            runtime.num_chips(engine.placement),
        )
        self._batch_size = global_batch_size(run, engine.mesh.size)
        # Of several processes each says at every step what it wants of all, and all hear it at the same one.
        self._agrees = runtime.num_processes > 1
        self._tokens_per_step = self._batch_size * run.training.seq_len
        self._skipped = int((self._start.meta or {}).get("skipped_steps", 0))
        self._under_way: deque[_Started] = deque()
        self._asked = NOTHING
        self._step = self._start.step  # that the state is of
        self._saved_step: int | None = None
        self._begun = self._last_finish = self._last_save = 0.0

    def run(self) -> int:
        """Runs every step that is left, then the held-out loss.

        Returns:
            The exit code: 0, 1 or 75.
        """
        parameters = sum(p.numel() for p in self._engine.model.parameters())
        log.info("%s parameters, %s tokens a step", f"{parameters:,}", f"{self._tokens_per_step:,}")
        if self._engine.mesh.size > 1:
            log.info("%d devices: %s", self._engine.mesh.size, self._engine.mesh)
        self._report_cores()
        training = self._streams.training
        example = training.batch_from(self._streams.first, 1)
        self._engine.compile_step(self._state, self._like_a_batch(example), self._ask())
        if training.num_skipped_records:
            log.warning("%d records of the data could not be read and are left out", training.num_skipped_records)
        try:
            stopped = self._steps()
        except _Halted as halt:
            return self._end_halted(halt.step)
        except SaveFailed:
            return 1
        if stopped:
            return PREEMPTED if self._save_last() else 1
        if self._skipped:
            total = self._run.training.steps
            log.warning("%d of %d steps were skipped: non-finite loss or gradient norm", self._skipped, total)
        return 0 if self._save_last() else 1

    def _loader(self) -> Loader:
        return Loader(
            self._streams.training,
            first_sequence=self._streams.first,
            num_steps=self._run.training.steps - self._start.step,
            batch_size=self._batch_size,
            rows=self._engine.batch_rows(self._batch_size // self._run.training.grad_accumulation),
            num_microbatches=self._run.training.grad_accumulation,
            num_workers=self._run.data.num_workers,
        )

    def _steps(self) -> bool:
        """Runs the steps; whether something asked to stop before the last."""
        last = self._run.training.steps
        with self._loader() as batches:
            self._begun = self._last_finish = self._last_save = time.perf_counter()
            self._stopper.running()
            for step, batch in enumerate(batches, start=self._start.step + 1):
                lr = self._rate(step - 1)
                self._state, metrics = self._engine.step(self._state, batch, lr, self._ask())
                self._step = step
                self._under_way.append(_Started(step, lr, batches.data_wait_s, metrics))
                if len(self._under_way) > 1:
                    self._finish(self._under_way.popleft())
                every = self._run.validation.every
                if step == last or (every is not None and step % every == 0):
                    self._validate(step)
                if step < last and self._save_is_due(step):
                    self._save(step)
                if step < last and (reason := self._reason_to_stop()):
                    log.warning("stopping after step %d: %s", step, reason)
                    self._drain()
                    return True
        return False

    def _ask(self) -> int | None:
        """What this process wants of all; None where it is alone."""
        if not self._agrees:
            return None
        if self._stopper.reason:
            return STOP
        return SAVE if self._runtime.process_index == 0 and self._clock_says_save() else NOTHING

    def _reason_to_stop(self) -> str | None:
        """Why to end after this step; of several processes all get the same answer at the same step."""
        if self._agrees and self._asked < STOP:
            return None
        return self._stopper.reason or ("another process was asked to" if self._agrees else None)

    def _like_a_batch(self, example: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A batch of this process's size whose values do not matter."""
        count = self._run.training.grad_accumulation
        rows = range(self._batch_size // count)[self._engine.batch_rows(self._batch_size // count)]
        return {name: np.repeat(values, count * len(rows), axis=0) for name, values in example.items()}

    def _drain(self) -> None:
        """Waits for the steps under way and writes their lines."""
        while self._under_way:
            self._finish(self._under_way.popleft())

    def _finish(self, started: _Started) -> None:
        """Waits for a step's metrics and writes its line."""
        metrics = self._runtime.fetch(started.metrics)
        now = time.perf_counter()
        seconds, self._last_finish = now - self._last_finish, now
        finite = bool(metrics.pop("finite"))
        self._asked = max(self._asked, int(metrics.pop("asked", NOTHING)))
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
            "skipped_records": self._streams.training.num_skipped_records,
            **{name: float(value) for name, value in metrics.items() if name not in ("loss", "grad_norm", "weight")},
        }
        self._loggers.write(record)
        if not finite:
            if self._run.training.on_nan == "stop":
                raise _Halted(started.step)
            log.warning("step %d skipped: non-finite loss or gradient norm", started.step)
        done = started.step - self._start.step
        seconds_left = (now - self._begun) / done * (self._run.training.steps - started.step)
        self._progress.step(record, seconds_left)

    def _validate(self, step: int) -> None:
        held_out = self._streams.held_out
        if held_out is None or self._run.validation.steps == 0:
            return
        self._drain()
        total = weight = 0.0
        rows = self._engine.batch_rows(self._batch_size)
        for i in range(min(self._run.validation.steps, held_out.num_batches(self._batch_size))):
            batch = {name: values[rows] for name, values in held_out.batch(i, self._batch_size).items()}
            sums = self._engine.held_out_sums(self._state, batch)
            total, weight = total + sums[0], weight + sums[1]
        loss = total / weight
        log.info("step %d: held-out loss %.4f nats per token, perplexity %.2f", step, loss, _perplexity(loss))
        self._loggers.write({"step": step, "validation_loss": loss, "validation_perplexity": _perplexity(loss)})
        self._last_finish = time.perf_counter()  # a step's time is without it

    def _save_is_due(self, step: int) -> bool:
        every = self._run.checkpoint.every
        if isinstance(every, int):
            return step % every == 0
        return self._asked >= SAVE if self._agrees else self._clock_says_save()

    def _clock_says_save(self) -> bool:
        every = self._run.checkpoint.every
        if not isinstance(every, str):
            return False
        return time.perf_counter() - self._last_save >= (duration_seconds(every) or math.inf)

    def _save(self, step: int) -> None:
        """Begins to save the state after a step.

        Raises:
            SaveFailed: it or the save before failed and `checkpoint.on_error` is stop.
        """
        self._drain()
        reason = attempt(self._checkpoints.wait)  # of the save before
        if reason is None:
            reason = attempt(lambda: self._checkpoints.save(step, self._state, self._meta(step)))
        if reason is None:
            self._saved_step = step
        else:
            self._report_failed_save(step, reason)
        self._last_save = self._last_finish = time.perf_counter()
        self._asked = NOTHING if self._asked == SAVE else self._asked

    def _report_failed_save(self, step: int, reason: str) -> None:
        kept = ", ".join(map(str, self._checkpoints.steps())) or "none"
        log.error("a checkpoint up to step %d cannot be written: %s; whole ones: %s", step, reason, kept)
        if self._run.checkpoint.on_error == "stop":
            raise SaveFailed

    def _save_last(self) -> bool:
        """Saves where the run ended and waits; whether it worked."""
        self._drain()
        step = self._step
        reason = attempt(self._checkpoints.wait)
        if reason is None and self._saved_step == step:
            log.info("checkpoint: %s", self._checkpoints.path(step))
            return True
        return self._save_and_wait(step, self._state)

    def _save_and_wait(self, step: int, state: Tree) -> bool:
        def save() -> None:
            self._checkpoints.save(step, state, self._meta(step))
            self._checkpoints.wait()

        reason = attempt(save)
        if reason is None:
            log.info("checkpoint: %s", self._checkpoints.path(step))
        else:
            log.error("the checkpoint of step %d cannot be written: %s", step, reason)
        return reason is None

    def _end_halted(self, bad: int) -> int:
        """Saves the state before a non-finite step, which that step and later ones left as it was."""
        self._under_way.clear()
        numbers = {"step": np.int32(bad - 1), "halted": np.bool_(False)}
        state = {**self._state, **self._engine.placement.put(numbers, "state")}
        saved = self._save_and_wait(bad - 1, state)
        where = f"the weights of step {bad - 1} are in {self._checkpoints.path(bad - 1)}" if saved else "they are lost"
        log.error(
            "step %d has a non-finite loss or gradient norm and training.on_nan is stop; %s. training.on_nan=skip "
            "leaves such steps out.", bad, where,
        )  # fmt: skip
        return 1

    def _meta(self, step: int) -> dict[str, Any]:
        position = self._streams.first + (step - self._start.step) * self._batch_size
        meta = checkpoint_meta(self._run, step, position, self._streams.training.fingerprint, self._skipped)
        padded = self._engine.padded_shapes()
        return {**meta, SHAPES: padded} if padded else meta

    def _report_cores(self) -> None:
        before = (self._start.meta or {}).get("num_cores", num_cores())
        if before != num_cores() and self._runtime.platform == "cpu":
            log.warning(
                "the checkpoint was made with %d cores and there are %d now: XLA repeats a run bit by bit only on the "
                "same number", before, num_cores(),
            )  # fmt: skip


class _Halted(Exception):
    """A non-finite step under `on_nan=stop`."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
