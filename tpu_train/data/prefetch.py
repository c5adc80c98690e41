"""Batches made ahead of time by a thread, and how long the consumer waited for them.

Key idea: a queue of fixed length between one producer and one consumer; the producer's end, error included, is the last
thing it puts there.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

CLOSE_SECONDS = 10


class Prefetch(Generic[T]):
    """Iterator over items that a thread makes ahead. For one consumer; a context manager, which ends the thread.

    Attributes:
        data_wait_s: seconds that the latest `next` waited.
    """

    def __init__(self, items: Iterable[T], depth: int = 2) -> None:
        """Starts the thread.

        Args:
            items: iterated in the thread; an exception of it is raised by `next`, after the items before it.
            depth: items made ahead at most, besides the one in the making.
        """
        assert depth >= 1, depth
        self.data_wait_s = 0.0
        self._queue: queue.Queue[T | _End] = queue.Queue(depth)
        self._stop = threading.Event()
        self._end: _End | None = None
        arguments = (items, self._queue, self._stop)
        self._thread = threading.Thread(target=_produce, args=arguments, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._end is None:
            start = time.perf_counter()
            item = self._queue.get()
            self.data_wait_s = time.perf_counter() - start
            if not isinstance(item, _End):
                return item
            self._end = item
        if self._end.error is not None:
            raise self._end.error
        raise StopIteration

    def close(self) -> None:
        """Ends the thread once it has made its current item, drops what was made; `next` then raises StopIteration.

        An item that takes longer than `CLOSE_SECONDS`, perhaps of a network that does not answer, is not waited for.
        """
        self._stop.set()
        deadline = time.monotonic() + CLOSE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.01)  # makes room: the producer may be waiting to put
        self._end = _End(None)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _End:
    """The producer is done: with its items, or by an error."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _produce(items: Iterable[T], output: "queue.Queue[T | _End]", stop: threading.Event) -> None:
    """Body of the thread. It does not hold the `Prefetch`."""
    error = None
    try:
        for item in items:
            output.put(item)
            if stop.is_set():
                break
        if isinstance(items, Generator):
            items.close()
    except BaseException as caught:  # whatever it is, the consumer must hear of it
        error = caught
    output.put(_End(error))
