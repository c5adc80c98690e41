"""The process that talks to Weights & Biases, run as a script by `wandb_logger`; imports wandb and nothing of ours.

Key idea: whatever wandb does (import, waiting for a server, retries, exit hooks, a service process of its own) it does
here, so that the run neither waits for it nor ends with it, and giving up on wandb is ending this process.

It reads a request, one JSON line, from stdin, then follows the spool, a file of records, until a line with the exit
code or the end of stdin says that the run is over. It answers on stdout with one JSON line per event:
`warning`, `started`, `failed`, `finished`.
"""

import contextlib
import json
import netrc
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

PROBE_SECONDS = 4  # for any answer at all, from the other side of the world too
POLL_SECONDS = 0.5
LAST_SECONDS = 60  # after the run's end, should nobody be left to end this process
# An offline run needs neither, and a wrong value would fail it.
ONLINE_ONLY_VARIABLES = ("WANDB_BASE_URL", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class Failed(Exception):
    """wandb cannot go on; the message is the reason."""


def main() -> None:
    """Serves one run; ends without exit hooks, which would wait for a server that is gone."""
    began = time.monotonic()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what wandb prints is no answer

    def answer(event: str, **values: Any) -> None:
        answers.write(json.dumps({"event": event, **values}) + "\n")

    code = 1
    try:
        request = json.loads(sys.stdin.readline())
        run, online = _start(request, began, answer)
        if run is not None:
            _follow(request, run, online)
        answer("finished")
        code = 0
    except BrokenPipeError:
        pass  # nobody is left to tell
    except Failed as failed:
        answer("failed", reason=str(failed))
    except BaseException as error:  # wandb raises many kinds, SystemExit among them; none is for this process to judge
        with contextlib.suppress(BrokenPipeError):
            answer("failed", reason=_in_one_line(error))
    os._exit(code)


def _start(request: dict[str, Any], began: float, answer: Any) -> tuple[Any, bool]:
    """The run and whether it is online; None if the user's wandb settings switch wandb off."""
    os.environ.pop("WANDB_MODE", None)  # the request has the last word
    os.environ.pop("WANDB_SERVICE", None)  # a service shared with other processes could not be ended
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ["WANDB_SILENT"] = "true"
    if request["mode"] == "offline":
        for name in ONLINE_ONLY_VARIABLES:
            os.environ.pop(name, None)
    import wandb

    settings = wandb.setup().settings
    mode, reason = _choose_mode(request["mode"], settings)
    if reason:
        answer("warning", message=reason)
    if mode == "disabled":
        return None, False
    online = mode == "online"
    left = request["start_limit_s"] - (time.monotonic() - began)
    run = wandb.init(
        project=request["project"],
        name=request["name"],
        tags=request["tags"] or None,
        id=request["id"],
        resume="allow" if online else None,
        dir=request["folder"],
        mode=mode,
        config=request["config"],
        settings=wandb.Settings(
            silent=True,
            init_timeout=max(1.0, left),
            x_disable_stats=True,
            console="off",
            disable_code=True,  # it would be this file
            disable_job_creation=True,
        ),
    )
    answer("started", online=online, url=run.url, folder=str(Path(run.dir).parent))
    return run, online


def _choose_mode(mode: str, settings: Any) -> tuple[Any, str]:
    """`online`, `offline` or `disabled`, and what to tell if that is not what was asked for."""
    if mode == "auto" and settings.mode in ("offline", "dryrun", "disabled"):
        return ("disabled" if settings.mode == "disabled" else "offline"), ""  # what `wandb offline` leaves
    if mode == "offline":
        return "offline", ""
    if not (settings.api_key or settings.identity_token_file or _netrc_key(settings.base_url)):
        message = "logging.wandb.mode=online has no API key; the run is offline. Log in with: wandb login"
        return "offline", message if mode == "online" else ""
    if reason := unreachable(settings.base_url):
        return "offline", f"{reason}; the run is offline"
    return "online", ""


def _netrc_key(base_url: str) -> str | None:
    """The key that `wandb login` leaves."""
    path = os.environ.get("NETRC")
    try:
        found = netrc.netrc(os.path.expanduser(path or "~/.netrc"))
    except (OSError, netrc.NetrcParseError):
        return None
    entry = found.authenticators(urllib.parse.urlsplit(base_url).netloc)
    return entry[2] if entry else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def unreachable(url: str, seconds: float = PROBE_SECONDS) -> str | None:
    """Why a server gives no answer, through the proxy if there is one; None if it gives any, a refusal included."""
    reasons: list[Exception] = []

    def ask() -> None:
        try:
            with urllib.request.build_opener(_NoRedirect).open(url, timeout=seconds):
                pass
        except urllib.error.HTTPError as error:
            error.close()
        except Exception as error:
            reason = getattr(error, "reason", error)
            if not isinstance(reason, ssl.SSLError):  # certificates are for wandb to judge
                reasons.append(error)

    # In a thread, since neither looking up a name nor a trickle of bytes obeys the timeout.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    if asking.is_alive():
        return f"{url} does not answer within {seconds:g} s"
    return f"{url} cannot be reached ({_in_one_line(reasons[0])})" if reasons else None


def _follow(request: dict[str, Any], run: Any, online: bool) -> None:
    """Logs what the spool has and gets, until the run is over, and finishes.

    Raises:
        Failed: the server is gone; finishing would wait for it.
    """
    over = threading.Event()
    exit_codes: list[int] = []

    def listen() -> None:
        line = sys.stdin.readline()
        exit_codes.append(json.loads(line)["exit_code"] if line else 1)
        over.set()
        time.sleep(LAST_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    rest = b""
    with Path(request["spool"]).open("rb") as spool:
        while True:
            ending = over.wait(POLL_SECONDS)  # asked before reading, so that the last read has the last record
            *lines, rest = (rest + spool.read()).split(b"\n")
            for line in lines:
                record = json.loads(line)
                step = record.pop("step")
                run.log(record, step=step)
            if ending:
                break
    if online and (reason := unreachable(run.settings.base_url)):
        raise Failed(reason)
    import wandb

    run.finish(exit_code=exit_codes[0])
    wandb.teardown(exit_codes[0])  # waits until the service process has written everything


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    main()
