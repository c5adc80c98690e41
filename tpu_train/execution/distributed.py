"""Several processes as one run: who they are, what they agree on, how all end when one is lost.

Key idea: JAX's coordination service, held by process 0, is the one channel besides the devices. A process that fails
says so there and a thread of each other process waits for that word; of a process that is killed JAX hears, by a broken
collective or missing heartbeats, and the abort that JAX ends in is turned into a readable last line and an exit code.
"""

import contextlib
import ctypes
import dataclasses
import glob
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from tpu_train.config.problems import ConfigError
from tpu_train.config.schema import Runtime as RuntimeConfig
from tpu_train.execution.rendezvous import Meeting, ProcessLost, meet

log = logging.getLogger(__name__)

JOIN_SECONDS = 300  # hosts of a slice come up minutes apart
HEARTBEAT_SECONDS = 20  # a process that is silent for this long is lost
_LEAVE_SECONDS = 120  # process 0 may still be ending its loggers
_WORD_SECONDS = 1  # for the others to hear why process 0, which holds the service, ends
_AGREE_MILLISECONDS = 3_600_000  # process 0 may be reading a large checkpoint; a loss ends the wait
_CONNECT_SECONDS = 45  # of processes that have met; with what JAX adds within the minute that a loss may take
_REFUSED = 2
_PORT = 8482  # JAX's own choice on Cloud TPU
_ENDED = "tpu_train/ended"
# What a collective or the service says of a peer that is gone; seen in JAX 0.10.2 by killing one of two processes.
_SIGNS_OF_LOSS = ("Gloo ", "oordination service", "oordinationService", "PollForError", "by peer", "Socket closed")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")

T = TypeVar("T", int, str)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Several processes, and who says so.

    Attributes:
        source: "runtime" (the configuration) or "jobset", with the three values; else the name of the method by which
            JAX finds them: "slurm", "gketpu" or "gcetpu".
        coordinator: host:port of process 0.
        num_processes: of the run.
        process_id: of this one.
    """

    source: str
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def find_cluster(
    runtime: RuntimeConfig, environ: Mapping[str, str], has_tpu: Callable[[], bool] | None = None
) -> Cluster | None:
    """The processes that this one belongs to; None where it is alone. Asks no server.

    Args:
        runtime: of the configuration; its keys come first.
        environ: of the process.
        has_tpu: whether this host has TPU chips; None looks.
    """
    if runtime.coordinator is not None:
        return Cluster("runtime", runtime.coordinator, runtime.num_processes, runtime.process_id)
    if all(name in environ for name in _SLURM) and int(environ["SLURM_NTASKS"]) > 1:
        return Cluster("slurm")
    if runtime.platform in ("auto", "tpu") and (has_tpu or _has_tpu)():
        return _find_tpu_cluster(environ)
    if {"JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX"} <= environ.keys():
        count = int(environ.get("NNODES", "1"))
        name, job = environ["JOBSET_NAME"], environ["REPLICATED_JOB_NAME"]
        address = environ.get("JAX_COORDINATOR_ADDRESS", f"{name}-{job}-0-0.{name}:{_PORT}")
        return Cluster("jobset", address, count, int(environ["JOB_COMPLETION_INDEX"])) if count > 1 else None
    return None


def _find_tpu_cluster(environ: Mapping[str, str]) -> Cluster | None:
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if hosts:  # GKE sets it, on a single host too
        return Cluster("gketpu") if "," in hosts or int(environ.get("MEGASCALE_NUM_SLICES", "1")) > 1 else None
    return None if "TPU_SKIP_MDS_QUERY" in environ else Cluster("gcetpu")


def _has_tpu() -> bool:
    if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/[0-9]*"):
        return False
    from jax._src import hardware_utils  # vfio holds other devices too

    return hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


class Processes:
    """The processes of a run, seen from one of them; with one, everything is at hand and JAX is not imported.

    As a context, it leaves in order at the end, and tells the others of an exception, which ends them.

    Args:
        index: of this process.
        count: of all.
        client: JAX's client of the coordination service; None with one process.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None) -> None:
        self.index, self.count = index, count
        self._client = client
        self._lock = threading.Lock()
        self._uses: dict[str, int] = {}
        self._ending = False
        self._listener = threading.Thread(target=self._listen, name="processes", daemon=True)
        if client is not None:
            self._listener.start()

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes what is written once."""
        return self.index == 0

    def agree(self, value: T, name: str = "agree") -> T:
        """Process 0's value, on all. One round trip to process 0: not for every step.

        Raises:
            ProcessLost: process 0 is gone.
        """
        if self._client is None:
            return value
        key = self._next(name)
        if self.is_first:
            self._ask(lambda client: client.key_value_set(key, json.dumps(value)))
            return value
        return json.loads(self._ask(lambda client: client.blocking_key_value_get(key, _AGREE_MILLISECONDS)))

    def barrier(self, name: str) -> None:
        """Returns when all processes are here.

        Raises:
            ProcessLost: one is gone.
        """
        if self._client is not None:
            key = self._next(name)
            self._ask(lambda client: client.wait_at_barrier(key, _AGREE_MILLISECONDS))

    def failures(self, failure: str | None, name: str) -> dict[int, str]:
        """What went wrong, by process, on all; a barrier.

        Args:
            failure: of this process; None for none.
            name: of what was tried, the same on all.

        Raises:
            ProcessLost: one is gone.
        """
        if self._client is None:
            return {} if failure is None else {self.index: failure}
        key = self._next(name)
        if failure is not None:
            self._ask(lambda client: client.key_value_set(f"{key}/{self.index}", failure))
        self._ask(lambda client: client.wait_at_barrier(f"{key}/all", _AGREE_MILLISECONDS))
        found = self._ask(lambda client: client.key_value_dir_get(f"{key}/"))
        return {int(path.rsplit("/", 1)[1]): text for path, text in found}

    def end_others(self, reason: str, code: int = 1) -> None:
        """Ends the other processes: this one ends out of turn. Returns in bounded time.

        Args:
            reason: one line, which the others show.
            code: that the others exit with.
        """
        if self._client is None or self._ending:
            return
        self._ending = True
        _aborts.become(f"process {self.index} of {self.count} ended: {reason}", code)
        word = json.dumps({"process": self.index, "reason": reason, "code": code})
        # The service may be gone or busy. What JAX does of its own at the exit of a process may wait for the lost one.
        teller = threading.Thread(target=self._say, args=(word,), daemon=True)
        teller.start()
        teller.join(5 * _WORD_SECONDS)
        self._listener.join(_WORD_SECONDS)  # a thread inside JAX when the interpreter ends is an abort
        if self.is_first:
            time.sleep(_WORD_SECONDS)

    def explained(self, error: Exception) -> Exception:
        """`ProcessLost` for an error that comes of a lost process; any other as it is."""
        text = " ".join(str(error).split())
        if self._client is None or isinstance(error, ProcessLost) or not any(sign in text for sign in _SIGNS_OF_LOSS):
            return error
        time.sleep(3 * _WORD_SECONDS)  # a process that failed and is not killed tells why, which ends this one
        return ProcessLost(f"{_LOST} ({text[:200]})")

    def leave(self) -> None:
        """Waits for all and leaves.

        Raises:
            ProcessLost: one is gone.
        """
        if self._client is None:
            return
        from jax._src.distributed import global_state

        self.barrier("leave")
        self._ending = True
        if self.is_first:
            self._say("")
        self._listener.join(_LEAVE_SECONDS)
        global_state.shutdown()
        _aborts.become(None)
        self._client = None

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.leave()
        elif self._client is not None:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            refused = isinstance(error, ConfigError)
            code = _REFUSED if refused else 1
            self.end_others("; ".join(lines) if refused else lines[0], code)
            # A step that waits for the lost process would keep the interpreter from ending: this ends it with its code,
            # and where no Python runs any more the alarm does.
            last = threading.Timer(25, os._exit, (code,))
            last.daemon = True
            last.start()
            signal.alarm(40)

    def _next(self, name: str) -> str:
        """A key of its own for each use; every process uses a name equally often."""
        with self._lock:
            self._uses[name] = count = self._uses.get(name, 0) + 1
        return f"tpu_train/{name}/{count}"

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._client)
        except Exception as error:
            if self._ending:
                raise
            raise ProcessLost(f"{_LOST} ({' '.join(str(error).split())[:200]})") from error

    def _say(self, word: str) -> None:
        assert self._client is not None
        with contextlib.suppress(Exception):  # another process was first, or the service is gone
            self._client.key_value_set(_ENDED, word)

    def _listen(self) -> None:
        """Waits for the word of a process that ends out of turn; the service's end is process 0's."""
        client = self._client
        assert client is not None
        while True:
            try:
                word = client.blocking_key_value_get(_ENDED, _AGREE_MILLISECONDS)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                word = json.dumps({"process": 0, "reason": "it does not answer", "code": 1})
            break
        if word and not self._ending:
            said = json.loads(word)
            if self.is_first:
                time.sleep(_WORD_SECONDS)  # the service's end would be the end of others, the one that said it included
            whom = f"process {said['process']} of {self.count} ended: {said['reason']}"
            go_on = "" if said["code"] == _REFUSED else f"; {_GO_ON}"
            _end(f"{whom}; process {self.index} ends too{go_on}", said["code"])


_GO_ON = "the same command goes on from the newest checkpoint"
_LOST = f"another process of the run was lost; {_GO_ON}"


def join(cluster: Cluster | None, timeout_seconds: int = JOIN_SECONDS) -> Processes:
    """Joins the processes of a run, before any device is used.

    Args:
        cluster: None: this process is alone.
        timeout_seconds: in which all must have come.

    Raises:
        RefusedElsewhere: another process cannot take part.
        ProcessLost: another process was here and is gone.
        ValueError: not all have come, or what the environment says of the processes is not enough.
    """
    if cluster is None:
        return Processes()
    import jax
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized()
    meeting, local_devices = _meeting(cluster, timeout_seconds)
    count, index = meeting.num_processes, meeting.process_id
    if count == 1:
        return Processes()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if local_devices:
        visible = ",".join(map(str, local_devices))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    meet(meeting)
    _aborts.become(f"process {index} of {count} ends: {_LOST}")
    client = _connect(meeting)
    if index == 0:
        log.info("%d processes (%s); they meet at %s", count, cluster.source, meeting.coordinator)
    return Processes(index, count, client)


def tell_refusal(cluster: Cluster | None, reason: str, timeout_seconds: int = JOIN_SECONDS) -> None:
    """Tells the other processes, which would wait, that this one cannot take part; returns when they know.

    Args:
        cluster: None: this process is alone.
        reason: what it was told.
        timeout_seconds: in which the others must have come to hear it.
    """
    if cluster is None:
        return
    with contextlib.suppress(Exception):  # the refusal is what this process ends with
        meeting, _ = _meeting(cluster, timeout_seconds)
        if meeting.num_processes > 1:
            log.warning("telling the other processes of the run, in up to %d s", timeout_seconds)
            meet(meeting, reason)


def _meeting(cluster: Cluster, timeout_seconds: int) -> tuple[Meeting, Any]:
    """Where the processes meet, and the local devices that this one is to use."""
    coordinator, count, index, local_devices = _resolved(cluster, timeout_seconds)
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", f"[::]:{coordinator.rsplit(':', 1)[1]}")
    return Meeting(coordinator, bind, count, index, timeout_seconds), local_devices


def _resolved(cluster: Cluster, timeout_seconds: int) -> tuple[str, int, int, Any]:
    """The coordinator, the number of processes, that of this one, and the local devices it is to use."""
    if cluster.coordinator is not None:
        assert cluster.num_processes is not None
        assert cluster.process_id is not None
        return cluster.coordinator, cluster.num_processes, cluster.process_id, None
    from jax._src import clusters

    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, count, index, local = detect(None, None, None, None, cluster.source, timeout_seconds)
    except Exception as error:  # `requests`, names that do not resolve, values that are no numbers
        raise ValueError(_unclear(cluster, f"{type(error).__name__}: {error}")) from error
    if address is None or count is None or index is None:
        raise ValueError(_unclear(cluster, "JAX does not find them; on TPU hosts libtpu must be installed"))
    return address, count, index, local


def _unclear(cluster: Cluster, reason: str) -> str:
    alone = " (TPU_SKIP_MDS_QUERY=1 in the environment if this host is alone)" if cluster.source == "gcetpu" else ""
    return (
        f"the environment ({cluster.source}) does not tell the processes of the run: {reason}; set "
        f"runtime.coordinator, runtime.num_processes and runtime.process_id{alone}"
    )


def _connect(meeting: Meeting) -> Any:
    """What `jax.distributed.initialize` does, but for two things that it has no argument for.

    The client does not wait for the other processes when this one exits by an error, and no service of JAX takes
    SIGTERM from the loop.
    """
    from jax._src import distributed
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]  # as jax.distributed does

    state: Any = distributed.global_state
    if meeting.process_id == 0:
        state.service = _jax.get_distributed_runtime_service(
            meeting.bind,
            meeting.num_processes,
            heartbeat_timeout=HEARTBEAT_SECONDS,
            shutdown_timeout=_LEAVE_SECONDS,
        )
    state.client = _jax.get_distributed_runtime_client(
        meeting.coordinator,
        meeting.process_id,
        init_timeout=_CONNECT_SECONDS,
        heartbeat_timeout=HEARTBEAT_SECONDS,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    state.coordinator_address = meeting.coordinator
    state.num_processes, state.process_id = meeting.num_processes, meeting.process_id
    try:
        state.client.connect()
    except Exception as error:
        raise ProcessLost(f"{_LOST} ({' '.join(str(error).split())[:200]})") from error
    return state.client


class _Aborts:
    """What an abort in C++ means: a line in the log and an exit code instead of SIGABRT.

    JAX has no other end for a process that hears of a lost one (its callback for Python fails with `std::bad_cast` in
    0.10.2). Python's own signal handlers run after a C++ handler returned, which `abort` does not wait for.
    """

    def __init__(self) -> None:
        self._message: str | None = None
        self._code = 1
        self._handler: Any = None

    def become(self, message: str | None, code: int = 1) -> None:
        """From here on an abort is this message; None: an abort is an abort."""
        self._message, self._code = message, code
        libc = ctypes.CDLL(None)
        if self._handler is None:
            self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)
            libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        default = ctypes.c_void_p(0)
        libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p) if message else default)

    def _on_abort(self, _: int) -> None:
        signal.alarm(5)  # ends the process if another thread keeps the log
        _end(f"{self._message} (JAX's report is on stderr)", self._code)


_aborts = _Aborts()


def _end(message: str, code: int) -> NoReturn:
    with contextlib.suppress(Exception):
        log.error("%s", message)
        for handler in logging.getLogger().handlers:
            handler.flush()
    os._exit(code)
