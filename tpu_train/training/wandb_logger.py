"""Metrics to Weights & Biases, by way of a process of its own (`wandb_process`).

Key idea: the loop appends a line to a file, the spool, and waits for nothing. The process follows that file; a thread
watches the process. Where going online fails, at the start or at the end, a second process writes the whole spool as an
offline run, so nothing logged is lost. Each wait has a limit.
"""

import contextlib
import glob
import json
import logging
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tpu_train.config.schema import Wandb

log = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]

START_LIMIT_SECONDS = 20
# wandb keeps the start limit itself and says why it failed; the process is ended where it does not.
START_MARGIN_SECONDS = 5
# Uploading a small run's rest takes about a second; what takes longer is left to `wandb sync`.
FINISH_LIMIT_SECONDS = 10
# Nothing but the machine is waited for.
OFFLINE_LIMIT_SECONDS = 60
RUN_ID_FILE = "wandb_run_id.txt"

_MODES: dict[str, Mode] = {
    "": "auto",
    "online": "online",
    "run": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def resolve_mode(mode: Mode, environ: Mapping[str, str]) -> Mode:
    """The mode in effect; `auto` is left where only wandb's own settings can tell."""
    if mode != "auto":
        return mode
    word = environ.get("WANDB_MODE", "")
    if word.lower() not in _MODES:
        log.warning("WANDB_MODE=%s is none of online, offline, disabled; wandb is offline", word)
    return _MODES.get(word.lower(), "offline")


def run_id(folder: Path) -> str:
    """The id of this folder's wandb run, kept in a file: whoever goes on in the folder goes on in the run."""
    path = folder / RUN_ID_FILE
    if path.exists() and (kept := path.read_text(encoding="utf-8").strip()):
        return kept
    new = os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
    path.write_text(new + "\n", encoding="utf-8")
    return new


class WandbLogger:
    """One wandb run, kept in the run folder.

    Args:
        config: `logging.wandb`.
        mode: `online`, `offline`, or `auto`: online if there is a key, else offline.
        folder: the run folder; wandb's files go to `wandb/` below it.
        run_config: the configuration, shown on the run's page.
    """

    name = "wandb"

    def __init__(self, config: Wandb, mode: Mode, folder: Path, run_config: dict[str, Any]) -> None:
        (folder / "wandb").mkdir(exist_ok=True)
        spool = folder / "wandb" / "spool.jsonl"
        self._spool = spool.open("w", encoding="utf-8", buffering=1)
        self._request = {
            "project": config.project,
            "name": config.name or _name(folder.resolve()),
            "tags": list(config.tags),
            "id": run_id(folder),
            "folder": str(folder),
            "spool": str(spool),
            "config": run_config,
            "start_limit_s": START_LIMIT_SECONDS,
        }
        self._mode: Mode = mode
        self._exit_code: int | None = None
        self._done = False
        self._events: queue.SimpleQueue[tuple[_Process | None, dict[str, Any]]] = queue.SimpleQueue()
        self._watch = threading.Thread(target=self._supervise, name="wandb", daemon=True)
        self._watch.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Takes one metrics line; the process logs it under its step."""
        values = {name: value for name, value in record.items() if value is not None}
        self._spool.write(json.dumps(values) + "\n")

    def close(self, exit_code: int) -> None:
        """Ends the wandb run; waits no longer than the limits above."""
        self._spool.close()
        self._exit_code = exit_code
        self._events.put((None, {}))
        self._watch.join(FINISH_LIMIT_SECONDS + OFFLINE_LIMIT_SECONDS)
        if self._done:
            Path(self._request["spool"]).unlink(missing_ok=True)

    def _supervise(self) -> None:
        try:
            if self._mode != "offline":
                reason = self._attempt(self._mode)
                if reason is None:
                    self._done = True
                    return
                log.warning("wandb failed: %s; everything logged goes to an offline run", reason)
            reason = self._attempt("offline")
            self._done = reason is None
        except Exception as error:  # no process, no memory, no disk: none may stop a run
            reason = f"{type(error).__name__}: {error}"
        if reason is not None:
            log.warning("wandb is off: %s; its records are in %s", reason, self._request["spool"])

    def _attempt(self, mode: Mode) -> str | None:
        """One process from its start to its end. Returns why it failed, None if it finished."""
        offline = mode == "offline"
        process = _Process({**self._request, "mode": mode}, self._events)
        started = finishing = False
        limit = OFFLINE_LIMIT_SECONDS if offline else START_LIMIT_SECONDS + START_MARGIN_SECONDS
        deadline = time.monotonic() + limit
        try:
            while True:
                if self._exit_code is not None and not finishing:
                    finishing = True
                    process.end_run(self._exit_code)
                    limit = OFFLINE_LIMIT_SECONDS if offline else FINISH_LIMIT_SECONDS
                    deadline = time.monotonic() + limit
                wait = None if started and not finishing else max(0.0, deadline - time.monotonic())
                try:
                    source, event = self._events.get(timeout=wait)
                except queue.Empty:
                    return f"it did not {'finish' if finishing else 'start'} within {limit} s"
                if source is not process:
                    continue  # the run's end, or the last words of a process given up
                match event["event"]:
                    case "started":
                        started = True
                        _log_place(event)
                    case "warning":
                        log.warning("wandb: %s", event["message"])
                    case "failed":
                        return event["reason"]
                    case "finished":
                        return None
        finally:
            process.end()


def _name(folder: Path) -> str:
    """The name of a folder, with its sweep's where it is that of a job."""
    return f"{folder.parent.name}-{folder.name}" if folder.name.isdigit() else folder.name


def _log_place(event: dict[str, Any]) -> None:
    if event["online"]:
        log.info("wandb: %s", event["url"])
    else:
        log.info("wandb: offline in %s; to upload it: wandb sync %s", event["folder"], event["folder"])


class _Process:
    """A running `wandb_process`.

    Args:
        request: what it is to do.
        events: gets what it answers, with this object; its end counts as a failure.
    """

    def __init__(self, request: dict[str, Any], events: "queue.SimpleQueue[Any]") -> None:
        script = Path(__file__).with_name("wandb_process.py")
        self._events = events
        # -P: neither this folder nor the current one is a place to import from. A session of its own: Ctrl-C is for
        # the run, and without a terminal nothing can prompt.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._listen, name="wandb answers", daemon=True).start()
        self._write(request)

    def end_run(self, exit_code: int) -> None:
        """Says that the run is over."""
        self._write({"exit_code": exit_code})

    def end(self) -> None:
        """Ends it and wandb's service process below it, kindly only if it has finished."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        if self._process.poll() is None:
            for pid in (*self._children(), self._process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()

    def _children(self) -> list[int]:
        # The service process ends when it misses its parent; where /proc tells which it is, at once.
        files = glob.glob(f"/proc/{self._process.pid}/task/*/children")
        with contextlib.suppress(OSError):
            return [int(pid) for file in files for pid in Path(file).read_text(encoding="ascii").split()]
        return []

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone, which `_listen` tells
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._events.put((self, json.loads(line)))
        self._events.put((self, {"event": "failed", "reason": "its process ended"}))
