"""Where the processes of a run meet before JAX does: all are there, or all hear why not.

Key idea: JAX's own start waits minutes for a process that will not come, and does not hear of one that is lost
meanwhile. So each process first opens a connection to process 0, at the address that JAX's service takes over
afterwards, and says who it is, or why it was refused. Process 0 lets them go when all are there. What was wrong goes
to all of them, and a connection that ends before that is a lost process.
"""

import contextlib
import dataclasses
import errno
import json
import logging
import selectors
import socket
import time
from types import TracebackType
from typing import Any, NoReturn

log = logging.getLogger(__name__)

_PORT_SECONDS = 60  # the bound on the end of a run that lost a process, whose restart this may be
_LINGER_SECONDS = 30  # for the others to come and hear why process 0 ends
_HELLO_SECONDS = 2  # a stranger that connects and is silent
_RETRY_SECONDS = 0.25
_LINE_BYTES = 1 << 16
# A host that is gone ends its connection in some 20 s: the first probe after 5 s of silence, then three, 5 s apart.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_WELCOME, _GO = {"say": "welcome"}, {"say": "go"}


class ProcessLost(Exception):
    """Another process of the run is gone; the same command goes on from the newest checkpoint."""


class RefusedElsewhere(Exception):
    """Another process of the run was refused, so that none can start.

    Attributes:
        process: that was, as "process 1 of 4".
        reason: what it was told.
    """

    def __init__(self, process: str, reason: str) -> None:
        self.process, self.reason = process, reason
        super().__init__(f"{process} was refused: {reason}")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Who meets where.

    Attributes:
        coordinator: host:port of process 0, as the others reach it.
        bind: host:port that process 0 listens at.
        num_processes: that are to come.
        process_id: of this one.
        timeout_seconds: in which all must have come.
    """

    coordinator: str
    bind: str
    num_processes: int
    process_id: int
    timeout_seconds: int

    def name(self, process_id: int) -> str:
        """Of a process, for people."""
        return f"process {process_id} of {self.num_processes}"


def meet(meeting: Meeting, refusal: str | None = None) -> None:
    """Returns when all processes are here; with a refusal, when they know it.

    Args:
        meeting: who and where.
        refusal: why this process cannot take part.

    Raises:
        RefusedElsewhere: another one was refused.
        ProcessLost: another one was here and is gone.
        ValueError: not all came in time, two have one number, process 0 does not answer, or its port is taken.
    """
    if meeting.process_id != 0:
        _attend(meeting, refusal)
        return
    with _listener(meeting) as listener:
        _Host(meeting, refusal).run(listener)


class _Peer:
    """A connection: JSON objects, a line each."""

    def __init__(self, connection: socket.socket, timeout_seconds: float) -> None:
        self._socket = connection
        self._file = connection.makefile("rb")
        connection.settimeout(timeout_seconds)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, word: dict[str, Any]) -> None:
        """Says something; that nobody hears it is found by who reads."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(word).encode() + b"\n")

    def receive(self, timeout_seconds: float | None = None) -> dict[str, Any]:
        """What the other side says next; nothing, if it is gone, silent or a stranger."""
        if timeout_seconds is not None:
            self._socket.settimeout(timeout_seconds)
        try:
            word = json.loads(self._file.readline(_LINE_BYTES))
        except (OSError, ValueError):
            return {}
        return word if isinstance(word, dict) else {}

    def __enter__(self) -> "_Peer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends it."""
        self._file.close()
        self._socket.close()


class _Host:
    """Process 0's side: counts who is here, and tells all of them how it goes on."""

    def __init__(self, meeting: Meeting, refusal: str | None) -> None:
        self._meeting = meeting
        self._here: dict[int, _Peer] = {}
        self._told: set[int] = set()  # or gone: who need not be waited for
        self._end: dict[str, Any] | None = None
        self._deadline = time.monotonic() + meeting.timeout_seconds
        self._refused = refusal is not None
        if refusal is not None:
            self._end = _refused(meeting.name(0), refusal)

    def run(self, listener: socket.socket) -> None:
        """Until all are here, or all know why not."""
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as opened:
            selector.register(listener, selectors.EVENT_READ)
            while not self._is_over():
                for key, _ in selector.select(_RETRY_SECONDS):
                    if key.fileobj is not listener:
                        selector.unregister(key.fileobj)
                        self._lose(key.data)
                    elif (come := self._accept(listener, opened)) is not None:
                        selector.register(self._here[come], selectors.EVENT_READ, come)
            for peer in self._here.values():
                peer.send(self._end or _GO)
        if self._end is not None and not self._refused:
            _raise(self._end)

    def _is_over(self) -> bool:
        others = self._meeting.num_processes - 1
        if self._end is not None:
            return len(self._told) == others or time.monotonic() >= self._deadline
        if len(self._here) == others:
            return True
        if time.monotonic() >= self._deadline:
            self._end = {"say": "wrong", "reason": self._missing()}
            return True
        return False

    def _missing(self) -> str:
        meeting = self._meeting
        missing = [index for index in range(1, meeting.num_processes) if index not in self._here]
        return (
            f"runtime.num_processes is {meeting.num_processes}, and process {', '.join(map(str, missing))} did not "
            f"come to {meeting.coordinator} within {meeting.timeout_seconds} s; see whether each one was started"
        )

    def _accept(self, listener: socket.socket, opened: contextlib.ExitStack) -> int | None:
        """Hears who has come; their number, if they stay."""
        try:
            connection, _ = listener.accept()
        except OSError:  # gone already
            return None
        peer = opened.enter_context(_Peer(connection, _HELLO_SECONDS))
        hello = peer.receive()
        index, count = hello.get("process"), hello.get("of")
        if not isinstance(index, int):
            peer.close()
            return None
        peer.send(_WELCOME)
        if hello.get("refused") is not None:
            self._told.add(index)
            self._finish(_refused(self._meeting.name(index), hello["refused"]))
            return None
        if wrong := self._objection(index, count):
            self._finish({"say": "wrong", "reason": wrong})
        if self._end is not None:
            self._told.add(index)
            peer.send(self._end)
            return None
        self._here[index] = peer
        return index

    def _objection(self, index: int, count: Any) -> str | None:
        ours = self._meeting.num_processes
        if count != ours:
            return f"runtime.num_processes is {ours} in process 0 and {count} in process {index}; give all the same"
        if index in self._here or not 0 < index < ours:
            return f"two processes have runtime.process_id={index}; give each one its own, from 0 to {ours - 1}"
        return None

    def _lose(self, index: int) -> None:
        """One of those here says nothing more until it is let go: its connection ended."""
        if self._here.pop(index, None) is None:
            return  # told of the end, and went
        self._told.add(index)
        self._finish({"say": "lost", "reason": f"{self._meeting.name(index)} was lost before all had come"})

    def _finish(self, end: dict[str, Any]) -> None:
        """The first thing that is wrong is what all hear."""
        if self._end is not None:
            return
        self._end = end
        self._deadline = min(self._deadline, time.monotonic() + _LINGER_SECONDS)
        for peer in self._here.values():
            peer.send(end)
        self._told |= self._here.keys()
        self._here.clear()
        if len(self._told) < self._meeting.num_processes - 1:
            log.warning("%s %s; waiting for the others to tell them", end.get("process", ""), end["reason"])


def _refused(process: str, reason: str) -> dict[str, Any]:
    return {"say": "refused", "process": process, "reason": reason}


def _raise(end: dict[str, Any]) -> NoReturn:
    if end["say"] == "refused":
        raise RefusedElsewhere(end["process"], end["reason"])
    raise (ProcessLost if end["say"] == "lost" else ValueError)(end["reason"])


def _attend(meeting: Meeting, refusal: str | None) -> None:
    """The others' side."""
    hello = {"process": meeting.process_id, "of": meeting.num_processes, "refused": refusal}
    with _welcomed(meeting, hello) as peer:
        if refusal is not None:
            return
        word = peer.receive(meeting.timeout_seconds + _LINGER_SECONDS)
    if not word:
        raise ProcessLost(f"{meeting.name(0)} was lost before all had come")
    if word != _GO:
        _raise(word)


def _welcomed(meeting: Meeting, hello: dict[str, Any]) -> _Peer:
    """The connection to process 0, once that answers: it may start later, and the run before may still listen."""
    host, port = meeting.coordinator.rsplit(":", 1)
    deadline = time.monotonic() + meeting.timeout_seconds
    while True:
        reason = "what listens there is not process 0"
        try:
            peer = _Peer(socket.create_connection((host.strip("[]"), int(port)), timeout=5), 5 * _HELLO_SECONDS)
        except OSError as error:
            reason = str(error)
        else:
            peer.send(hello)
            if peer.receive() == _WELCOME:
                return peer
            peer.close()
        if time.monotonic() >= deadline:
            raise ValueError(
                f"runtime.coordinator is {meeting.coordinator}, where process 0 did not answer within "
                f"{meeting.timeout_seconds} s ({reason}); start process 0, or set the address under which this host "
                "reaches it"
            )
        time.sleep(_RETRY_SECONDS)


def _listener(meeting: Meeting) -> socket.socket:
    """Listens once nothing else does, such as the run that this one restarts: gRPC would share the port in silence."""
    host, port = meeting.bind.rsplit(":", 1)
    host = host.strip("[]")
    seconds = min(meeting.timeout_seconds, _PORT_SECONDS)
    deadline = time.monotonic() + seconds
    everywhere, dual = host in ("", "::"), socket.has_dualstack_ipv6()
    if everywhere and not dual:
        host = "0.0.0.0"  # as JAX's service does
    family = socket.AF_INET6 if ":" in host or (everywhere and dual) else socket.AF_INET
    while True:
        try:
            return socket.create_server(
                (host, int(port)), family=family, backlog=meeting.num_processes, dualstack_ipv6=everywhere and dual
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ValueError(
                    f"runtime.coordinator is {meeting.coordinator}, and this host cannot listen at {meeting.bind} "
                    f"({error}); choose another port"
                ) from error
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"runtime.coordinator is {meeting.coordinator}, and port {port} of this host has been in use for "
                    f"{seconds} s; choose another port"
                ) from error
        time.sleep(_RETRY_SECONDS)
