"""Processes meet, or all hear why not: here each one is a thread."""

import json
import socket
import threading
import time
from collections.abc import Sequence

import pytest

from tpu_train.execution import rendezvous
from tpu_train.execution.rendezvous import Meeting, ProcessLost, RefusedElsewhere, meet


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def meeting(index: int, count: int, port: int, timeout_seconds: int = 20) -> Meeting:
    return Meeting(f"127.0.0.1:{port}", f"[::]:{port}", count, index, timeout_seconds)


class Outcome(threading.Thread):
    """How one process fares."""

    def __init__(self, own: Meeting, refusal: str | None = None, delay_seconds: float = 0) -> None:
        super().__init__(daemon=True)
        self._own, self._refusal, self._delay_seconds = own, refusal, delay_seconds
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        time.sleep(self._delay_seconds)
        try:
            meet(self._own, self._refusal)
        except Exception as error:
            self.error = error


def errors(outcomes: Sequence[Outcome]) -> list[Exception | None]:
    for outcome in outcomes:
        outcome.join(30)
        assert not outcome.is_alive()
    return [outcome.error for outcome in outcomes]


def stand_in(port: int, hello: object) -> socket.socket:
    """A connection that says something to process 0, once that listens, and no more."""
    deadline = time.monotonic() + 10
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        else:
            connection.sendall(json.dumps(hello).encode() + b"\n")
            return connection


def test_all_go_when_all_have_come_however_late_and_the_port_is_free_again() -> None:
    port = free_port()
    outcomes = [Outcome(meeting(index, 4, port), delay_seconds=delay) for index, delay in enumerate((1, 0, 2, 0))]
    with stand_in(port, "a stranger"):
        assert errors(outcomes) == [None] * 4
    again = [Outcome(meeting(index, 2, port)) for index in range(2)]
    assert errors(again) == [None] * 2


@pytest.mark.parametrize("refused", [0, 1])
def test_a_refusal_reaches_all_one_that_comes_later_too(refused: int) -> None:
    port = free_port()
    outcomes = [
        Outcome(meeting(index, 3, port), "data.path: no such file" if index == refused else None, 2.0 * (index == 2))
        for index in range(3)
    ]
    found = errors(outcomes)
    assert found[refused] is None
    for index in {0, 1, 2} - {refused}:
        with pytest.raises(RefusedElsewhere, match=rf"process {refused} of 3 was refused: data.path: no such file"):
            raise found[index] or AssertionError


def test_refusals_of_all_end_at_once() -> None:
    port = free_port()
    begun = time.monotonic()
    assert errors([Outcome(meeting(index, 3, port), "no") for index in range(3)]) == [None] * 3
    assert time.monotonic() - begun < 10


def test_one_that_is_lost_while_others_are_awaited_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 1)
    port = free_port()
    outcomes = [Outcome(meeting(index, 4, port)) for index in (0, 1)]
    lost = stand_in(port, {"process": 2, "of": 4, "refused": None})
    assert lost.recv(100) == b'{"say": "welcome"}\n'
    lost.close()
    for error in errors(outcomes):
        with pytest.raises(ProcessLost, match="process 2 of 4 was lost before all had come"):
            raise error or AssertionError


def test_a_lost_process_0_ends_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = Outcome(meeting(1, 3, server.getsockname()[1]))
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b'{"say": "welcome"}\n')
            time.sleep(0.5)
    (error,) = errors([outcome])
    with pytest.raises(ProcessLost, match="process 0 of 3 was lost before all had come"):
        raise error or AssertionError


def test_those_that_do_not_come_are_named_to_all_that_came() -> None:
    port = free_port()
    found = errors([Outcome(meeting(index, 4, port, timeout_seconds=2)) for index in (0, 2)])
    for error in found:
        with pytest.raises(
            ValueError, match=rf"num_processes is 4, and process 1, 3 did not come to 127.0.0.1:{port} within 2 s"
        ):
            raise error or AssertionError


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ((1, 3), "two processes have runtime.process_id=1; give each one its own, from 0 to 2"),
        ((2, 4), "runtime.num_processes is 3 in process 0 and 4 in process 2; give all the same"),
    ],
    ids=["number", "count"],
)
def test_processes_that_were_told_different_things_are_refused(
    monkeypatch: pytest.MonkeyPatch, own: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(rendezvous, "_LINGER_SECONDS", 1)
    port = free_port()
    outcomes = [Outcome(meeting(0, 3, port)), Outcome(meeting(1, 3, port)), Outcome(meeting(*own, port), None, 1.0)]
    for error in errors(outcomes):
        with pytest.raises(ValueError, match=message):
            raise error or AssertionError


def test_a_process_0_that_does_not_answer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"runtime.coordinator is 127.0.0.1:\d+, where process 0 did not answer within 1 s"
    ):
        meet(meeting(1, 2, free_port(), timeout_seconds=1))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_is_in_use_is_refused(host: str) -> None:
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} of this host has been in use for 1 s; choose another port"):
            meet(meeting(0, 2, port, timeout_seconds=1))


def test_an_address_that_is_not_this_hosts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"this host cannot listen at 203.0.113.1:\d+ .*; choose another port"):
        meet(Meeting("203.0.113.1:1", f"203.0.113.1:{free_port()}", 2, 0, 1))
