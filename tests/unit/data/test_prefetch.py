"""Prefetching keeps order, measures waiting, ends its thread and passes errors on."""

import threading
import time
from collections.abc import Iterator

import pytest

from tpu_train.data import prefetch
from tpu_train.data.prefetch import Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_items_arrive_in_order_and_end() -> None:
    with Prefetch(range(100), depth=3) as items:
        assert list(items) == list(range(100))
        assert list(items) == []
    assert not threads()


def test_items_are_made_ahead_but_no_more_than_depth() -> None:
    made: list[int] = []
    ahead = threading.Event()

    def source() -> Iterator[int]:
        for i in range(100):
            made.append(i)
            if i == 3:
                ahead.set()
            yield i

    with Prefetch(source(), depth=2) as items:
        assert next(items) == 0
        assert ahead.wait(5)  # 1 and 2 in the queue, 3 in the making
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_waiting_is_measured() -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        yield 1
        release.wait(5)
        time.sleep(0.2)
        yield 2

    with Prefetch(source()) as items:
        next(items)
        time.sleep(0.1)
        next(items)
        ready_s = items.data_wait_s
        release.set()
        next(items)
        assert ready_s < 0.1 < items.data_wait_s < 5


def test_an_error_of_the_producer_is_raised_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("shard 7 is broken")

    with Prefetch(source()) as items:
        assert next(items) == 1
        for _ in range(2):
            with pytest.raises(ValueError, match="shard 7 is broken"):
                next(items)
    assert not threads()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_leaving_early_ends_the_thread_and_closes_the_source(depth: int) -> None:
    closed: list[bool] = []

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.append(True)

    items = Prefetch(endless(), depth)

    def loop() -> None:
        with items:
            next(items)
            raise RuntimeError("the loop failed")

    with pytest.raises(RuntimeError, match="the loop failed"):
        loop()
    assert closed == [True]
    assert not threads()
    assert list(items) == []
    items.close()


def test_an_item_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "CLOSE_SECONDS", 0.1)
    release = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        release.wait(10)

    with Prefetch(source()) as items:
        next(items)
    assert list(items) == []
    assert threads()
    release.set()
    for thread in threads():
        thread.join(10)
