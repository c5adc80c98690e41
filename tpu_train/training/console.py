"""What a person sees of a run: a progress line on a terminal, plain lines elsewhere. All of it goes to stderr."""

import contextlib
import dataclasses
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

log = logging.getLogger(__name__)

_LINE, _TIME = "%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"


@dataclasses.dataclass(frozen=True)
class Console:
    """What `console_logging` shows on stderr."""

    handler: logging.Handler

    def of_process(self, index: int) -> None:
        """From here on it is that of one of several processes: others than 0 show warnings, with their number."""
        if index != 0:
            self.handler.setLevel(logging.WARNING)
            self.handler.setFormatter(_WithoutTraceback(f"process {index}: {_LINE}", datefmt=_TIME))


@contextlib.contextmanager
def console_logging(verbose: bool | Sequence[str] = False) -> Iterator["Console"]:
    """Shows this package's log from INFO on, and warnings of others, Python's `warnings` too, on stderr.

    Args:
        verbose: loggers to show from DEBUG on, in log.txt too: this package's, or these.
    """
    handler = _StderrHandler()
    handler.setFormatter(_WithoutTraceback(_LINE, datefmt=_TIME))
    root = logging.getLogger()
    levels = {"tpu_train": logging.DEBUG if verbose is True else logging.INFO}
    levels |= {} if isinstance(verbose, bool) else dict.fromkeys(verbose, logging.DEBUG)
    before = {name: logging.getLogger(name).level for name in levels}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    root.addHandler(handler)
    warned = logging.getLogger("py.warnings")
    warned.addFilter(_to_one_line)
    logging.captureWarnings(True)
    excepthook, threading.excepthook = threading.excepthook, _log_thread_error
    try:
        yield Console(handler)
    finally:
        threading.excepthook = excepthook
        logging.captureWarnings(False)
        warned.removeFilter(_to_one_line)
        root.removeHandler(handler)
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


class _WithoutTraceback(logging.Formatter):
    """Of an error its last line; the traceback is for log.txt."""

    def format(self, record: logging.LogRecord) -> str:
        if not record.exc_info:
            return super().format(record)
        short = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        error = record.exc_info[1]
        return f"{super().format(short)}: {type(error).__name__}: {' '.join(str(error).split())}"


def _log_thread_error(failure: threading.ExceptHookArgs) -> None:
    """An error that ends a thread of some library."""
    if failure.exc_value is not None:
        trace = (failure.exc_type, failure.exc_value, failure.exc_traceback)
        log.warning("a thread failed (%s)", failure.thread.name if failure.thread else "gone", exc_info=trace)


def _to_one_line(record: logging.LogRecord) -> bool:
    """`warnings` writes the place, the message and the line of code on lines of their own."""
    record.msg, record.args = " ".join(record.getMessage().split()), ()
    return True


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what `sys.stderr` is at the time of the line: a progress line replaces it to stay at the bottom."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class Reporter(Protocol):
    """Shows steps as they finish."""

    def step(self, record: dict[str, Any], seconds_left: float) -> None:
        """Shows one step's metrics line and the time left."""
        ...


def describe_step(record: dict[str, Any], steps: int, seconds_left: float) -> str:
    """One step in one line."""
    minutes, seconds = divmod(round(seconds_left), 60)
    return (
        f"step {record['step']}/{steps}  loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s  "
        f"MFU {record['mfu']:.1%}  left {minutes}:{seconds:02d}"
    )


class PlainReporter:
    """A log line every `log_every` steps, and for the first and the last."""

    def __init__(self, steps: int, log_every: int) -> None:
        self._steps = steps
        self._log_every = log_every

    def step(self, record: dict[str, Any], seconds_left: float) -> None:
        """Logs one line."""
        if record["step"] % self._log_every == 0 or record["step"] in (1, self._steps):
            log.info("%s", describe_step(record, self._steps, seconds_left))


class ProgressReporter:
    """A line that renews itself at the bottom of a terminal; log lines scroll above it."""

    def __init__(self, progress: Any, steps: int) -> None:
        self._progress = progress
        self._steps = steps
        self._task = progress.add_task("", total=steps)

    def step(self, record: dict[str, Any], seconds_left: float) -> None:
        """Renews the line."""
        text = describe_step(record, self._steps, seconds_left)
        self._progress.update(self._task, completed=record["step"], description=text)


@contextlib.contextmanager
def reporter(steps: int, log_every: int, *, is_first: bool = True) -> Iterator[Reporter]:
    """The reporter that fits stderr, for the time of a run; in a process that is not the first, none shows."""
    if not is_first or not sys.stderr.isatty():  # its INFO lines are not shown
        yield PlainReporter(steps, log_every)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=20), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield ProgressReporter(progress, steps)
