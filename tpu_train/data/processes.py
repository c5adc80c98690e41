"""A map over processes, results in the order of the items.

Key idea: a worker is a Python of its own that is told a function once and then gets one item at a time through its
pipes. It shares nothing with the run: it does not import the program that started it, as `multiprocessing` would, so
neither torch nor jax; and when the run ends, by whatever means, its pipe closes and it ends too.
"""

import contextlib
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_LENGTH = struct.Struct("<Q")
# The workers are the parallelism; a tokenizer's own threads would only compete with them.
_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    """Results of `function` in the order of the items, twice as many made ahead as there are workers.

    Args:
        function: can be pickled, and so can items and results.
        items: taken in the calling thread, as results are.
        num_workers: processes; 0 calls the function here.

    Raises:
        RuntimeError: a worker ended. What the function raises is raised here, in the place of its result.
    """
    if num_workers == 0:
        for item in items:
            yield function(item)
        return
    with contextlib.ExitStack() as stack:
        workers = [_Worker(function) for _ in range(num_workers)]
        for worker in workers:
            stack.callback(worker.close)
        pool = stack.enter_context(ThreadPoolExecutor(num_workers, thread_name_prefix="data-worker"))
        stack.callback(_kill, workers)  # first of all: a thread that waits for its worker's result then ends
        idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def call(item: Item) -> Result:
            worker = idle.get()
            try:
                return worker.call(item)
            finally:
                idle.put(worker)

        pending: deque[Future[Result]] = deque()
        stack.callback(_cancel, pending)
        for item in items:
            pending.append(pool.submit(call, item))
            if len(pending) > 2 * num_workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Worker:
    """A process that computes a function of items."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from tpu_train.data.processes import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
        )
        self._function: Callable[[Any], Any] | None = function

    def call(self, item: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            if self._function is not None:  # sent by the thread that waits for the result anyway
                _send(self._process.stdin, self._function)
                self._function = None
            _send(self._process.stdin, item)
            succeeded, result = _receive(self._process.stdout)
        except (EOFError, BrokenPipeError) as error:
            code = self._process.wait()
            raise RuntimeError(
                f"a data worker process ended with exit code {code}"
                + (": it was killed, perhaps for want of memory" if code == -signal.SIGKILL else "")
            ) from error
        if not succeeded:
            raise result
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was still to be written
                pipe.close()


def _kill(workers: Iterable[_Worker]) -> None:
    for worker in workers:
        worker.kill()


def _cancel(pending: Iterable[Future[Any]]) -> None:
    for future in pending:
        future.cancel()


def serve() -> None:
    """What a worker runs: a function, then items, from stdin; for each, whether it succeeded and the result."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the run is told, and ends its workers
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(EOFError, BrokenPipeError):
        function = _receive(requests)
        while True:
            item = _receive(requests)
            try:
                answer = (True, function(item))
            except Exception as error:
                answer = (False, error)
            _send(answers, answer)


def _send(pipe: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    data = pipe.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)
