"""Several processes: who finds them, what they agree on, and how all end when one does."""

import dataclasses
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from jax._src.clusters import cloud_tpu_cluster

from tests.unit.runs import make_run
from tpu_train.execution import distributed
from tpu_train.execution.distributed import Cluster, Processes, find_cluster
from tpu_train.execution.rendezvous import Meeting, RefusedElsewhere, meet

ALONE = dataclasses.replace(make_run().runtime, platform="auto")
TOLD = dataclasses.replace(ALONE, coordinator="10.0.0.1:8482", num_processes=4, process_id=2)
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[003-006],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}
GKE = {"TPU_WORKER_HOSTNAMES": "localhost,worker-1", "TPU_WORKER_ID": "1"}
MULTISLICE = {
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
}
JOBSET = {"JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "train", "JOB_COMPLETION_INDEX": "1", "NNODES": "2"}


@pytest.mark.parametrize(
    ("runtime", "environ", "has_tpu", "found"),
    [
        (ALONE, {}, False, None),
        (TOLD, SLURM, False, Cluster("runtime", "10.0.0.1:8482", 4, 2)),
        (ALONE, SLURM, False, Cluster("slurm")),
        (ALONE, {**SLURM, "SLURM_NTASKS": "1"}, False, None),
        (ALONE, {key: SLURM[key] for key in SLURM if key != "SLURM_STEP_NODELIST"}, False, None),  # not under srun
        (ALONE, GKE, True, Cluster("gketpu")),
        (ALONE, GKE, False, None),
        (ALONE, {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, True, None),
        (ALONE, {"TPU_WORKER_HOSTNAMES": "localhost", **MULTISLICE}, True, Cluster("gketpu")),
        (ALONE, {}, True, Cluster("gcetpu")),
        (ALONE, {"TPU_SKIP_MDS_QUERY": "1"}, True, None),
        (dataclasses.replace(ALONE, platform="cpu"), GKE, True, None),
        (ALONE, JOBSET, False, Cluster("jobset", "run-train-0-0.run:8482", 2, 1)),
        (ALONE, {**JOBSET, "JAX_COORDINATOR_ADDRESS": "here:1"}, False, Cluster("jobset", "here:1", 2, 1)),
        (ALONE, {**JOBSET, "NNODES": "1"}, False, None),
    ],
)
def test_processes_are_found_by_the_configuration_then_the_environment(
    runtime: distributed.RuntimeConfig, environ: Mapping[str, str], has_tpu: bool, found: Cluster | None
) -> None:
    assert find_cluster(runtime, environ, lambda: has_tpu) == found


@pytest.mark.parametrize(
    ("method", "environ", "resolved"),
    [
        ("slurm", SLURM, ("node003:61441", 4, 3)),  # 61440 + 4097 % 4096
        ("gketpu", GKE, ("localhost:8482", 2, 1)),
        ("gketpu", {**GKE, **MULTISLICE}, ("localhost:8482", 4, 3)),
    ],
)
def test_jax_reads_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, method: str, environ: Mapping[str, str], resolved: tuple[str, int, int]
) -> None:
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for name, value in {"MEGASCALE_NUM_SLICES": "", "MEGASCALE_SLICE_ID": "", **environ}.items():
        monkeypatch.setenv(name, value)
    if "MEGASCALE_COORDINATOR_ADDRESS" not in environ:
        monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value", os.environ.get)  # would ask the metadata server
    assert distributed._resolved(Cluster(method), 1)[:3] == resolved


def test_an_environment_that_does_not_tell_enough_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the environment \(slurm\) does not tell .* set runtime.coordinator"):
        distributed._resolved(Cluster("slurm"), 1)


def test_a_process_that_is_alone_agrees_with_itself_and_imports_no_jax() -> None:
    script = """
        import sys
        from tpu_train.execution.distributed import join
        with join(None) as processes:
            processes.barrier("here")
            assert (processes.agree(3), processes.agree("x")) == (3, "x")
            assert processes.failures("bad", "save") == {0: "bad"}
            processes.end_others("nobody")
        assert "jax" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    error = ValueError("Gloo all-reduce failed")
    assert Processes().explained(error) is error


PEER = """
    import logging, os, signal, sys, time
    from tpu_train.execution import distributed
    from tpu_train.execution.distributed import Cluster, join

    distributed.HEARTBEAT_SECONDS = 5
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    index, port, timeout = map(int, sys.argv[1:4])

    def all_reduce():
        import jax
        import numpy as np

        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
        x = jax.make_array_from_process_local_data(sharding, np.ones(1, np.float32))
        return float(jax.jit(lambda x: x.sum())(x))

    with join(Cluster("runtime", f"127.0.0.1:{port}", 2, index), timeout) as processes:
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_peers(tmp_path: Path, body: str, *, peers: int = 2, timeout: int = 30) -> list[tuple[int, str, str, float]]:
    """Exit code, stdout, stderr and seconds of two processes with a body each of their own `index`."""
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(PEER) + textwrap.indent(textwrap.dedent(body), "    "))
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    begun, port = time.monotonic(), str(free_port())
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(index), port, str(timeout)],
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(peers)
    ]
    ended = []
    for process in started:
        out, err = process.communicate(timeout=60)
        ended.append((process.returncode, out, err, time.monotonic() - begun))
    return ended


def test_processes_agree_on_what_process_0_says_and_on_each_failure(tmp_path: Path) -> None:
    ended = run_peers(
        tmp_path,
        """
        said = [processes.agree(index + 5), processes.agree(f"x{index}"), all_reduce()]
        failures = processes.failures("disk full" if index == 1 else None, "save")
        print("SAID", [*said, failures, processes.failures(None, "save")])
        """,
    )
    for code, out, err, _ in ended:
        assert code == 0, err
        assert "SAID [5, 'x0', 2.0, {1: 'disk full'}, {}]" in out


@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_ends_the_others_with_its_reason(tmp_path: Path, failing: int) -> None:
    ended = run_peers(
        tmp_path,
        f"""
        all_reduce()
        if index == {failing}:
            raise OSError("disk full")
        time.sleep(60)
        """,
    )
    assert "OSError: disk full" in ended[failing][2]
    code, _, err, _ = ended[1 - failing]
    assert code == 1
    assert err.splitlines()[-1] == (
        f"process {failing} of 2 ended: disk full; process {1 - failing} ends too; the same command goes on from the "
        "newest checkpoint"
    )


def test_an_end_out_of_turn_gives_the_others_its_exit_code(tmp_path: Path) -> None:
    ended = run_peers(
        tmp_path,
        """
        if index == 1:
            processes.end_others("SIGTERM before the first step: nothing to save", 75)
            os._exit(75)
        time.sleep(60)
        """,
    )
    assert [code for code, *_ in ended] == [75, 75]


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("work", ["time.sleep(0.01)", "all_reduce()"])
def test_a_process_that_is_killed_ends_the_others_with_a_readable_last_line(
    tmp_path: Path, killed: int, work: str
) -> None:
    ended = run_peers(
        tmp_path,
        f"""
        all_reduce()
        begun = time.monotonic()
        while index != {killed} or time.monotonic() < begun + 1:
            try:
                {work}
            except Exception as error:
                raise processes.explained(error)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    assert ended[killed][0] == -9
    code, _, err, seconds = ended[1 - killed]
    assert (code, seconds < 40) == (1, True)
    last = err.splitlines()[-1]
    assert "lost" in last or "process 0 of 2 ended: it does not answer" in last
    assert "the same command goes on from the newest checkpoint" in last


def test_a_refused_process_exits_with_2_and_so_do_the_others_without_the_word_of_going_on(tmp_path: Path) -> None:
    ended = run_peers(
        tmp_path,
        """
        from tpu_train.config.problems import ConfigError, Problem
        if index == 1:
            try:
                with processes:
                    raise ConfigError([Problem("run_dir", "is not seen"), Problem("data.path", "is not there")])
            except ConfigError:
                time.sleep(0.5)  # to show it takes less
                print("SHOWN", flush=True)
                os._exit(2)
        time.sleep(60)
        """,
    )
    assert [code for code, *_ in ended] == [2, 2]
    assert "SHOWN" in ended[1][1]
    assert ended[0][2].splitlines()[-1] == (
        "process 1 of 2 ended: run_dir: is not seen; data.path: is not there; process 0 ends too"
    )


def test_a_refusal_is_told_to_a_process_that_would_wait(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    script = """
        import sys
        from tpu_train.execution.distributed import Cluster, tell_refusal
        tell_refusal(None, "alone")
        tell_refusal(Cluster("runtime", sys.argv[1], 2, 1), "data.path: no such file", 30)
        assert "jax" not in sys.modules
    """
    address = f"127.0.0.1:{port}"
    teller = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), address])
    try:
        with pytest.raises(RefusedElsewhere, match=r"process 1 of 2 was refused: data.path: no such file"):
            meet(Meeting(address, address, 2, 0, 30))
        assert teller.wait(30) == 0
    finally:
        teller.kill()
