"""Ending a run early and in order: SIGTERM, SIGINT and a maximum wall time.

Key idea: a signal only asks. The loop finishes its step, saves and ends; a second signal, or one that comes while
nothing is to be saved and the process sits in a compiler, ends the process at once. Python runs handlers between its
own instructions only, so a thread reads the signal from the wake-up descriptor, which is written at once.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

PREEMPTED = 75
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    """Tells the loop when to stop.

    Args:
        max_seconds: wall time; None for no limit.
        at_once: called with the reason and the exit code before the process ends at once.
    """

    def __init__(self, max_seconds: float | None, at_once: Callable[[str, int], None] = lambda *_: None) -> None:
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds
        self._at_once = at_once
        self._signal: int | None = None
        self._saving_makes_sense = False

    @property
    def reason(self) -> str | None:
        """Why to stop now; None for going on."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "training.max_time"
        return None

    def running(self) -> None:
        """The loop runs: from here on a signal waits for it."""
        self._saving_makes_sense = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes signals for the time of a run; in another thread than the main one, which gets none, does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        descriptor = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()
            thread.join()
            reader.close()

    def _listen(self, reader: socket.socket) -> None:
        while received := reader.recv(1):
            number = received[0]
            if number not in _SIGNALS:
                continue
            name = signal.Signals(number).name
            if self._signal is not None:
                self._end(f"{name} again: ending at once", 128 + number)
            self._signal = number
            if not self._saving_makes_sense:
                self._end(f"{name} before the first step: nothing to save", PREEMPTED)
            log.warning("%s: finishing the step and saving; a second signal ends the run at once", name)

    def _end(self, message: str, code: int) -> None:
        log.warning("%s", message)
        with contextlib.suppress(Exception):
            self._at_once(message, code)
        os._exit(code)
