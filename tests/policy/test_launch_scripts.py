"""The launchers of docs/many_hosts.md are what SLURM, Kubernetes and bash read."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tpu_train.config.compose import compose

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHELL = ("launch_slurm", "launch_xpk")

# Stands for srun, scontrol, xpk and tpu-train: says its words; srun ends as CODE says.
FAKE = """#!/usr/bin/env bash
echo "$(basename "$0"): $*"
[ "$(basename "$0")" != srun ] || exit "$CODE"
"""


@pytest.mark.parametrize("name", SHELL)
def test_a_launcher_is_bash_that_can_be_run_and_says_how(name: str) -> None:
    path = SCRIPTS / name
    subprocess.run(["bash", "-n", path], check=True)
    text = path.read_text(encoding="utf-8")
    assert os.access(path, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# Trains on ")
    assert "set -euo pipefail" in text


def test_slurm_reads_its_directives_before_the_first_command() -> None:
    lines = (SCRIPTS / "launch_slurm").read_text(encoding="utf-8").splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    said = [line[len("#SBATCH --") :].partition("=") for line in lines if line.startswith("#SBATCH --")]
    directives = {name: value for name, _, value in said}
    assert all(i < first_command for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    assert directives["ntasks-per-node"] == "1"
    assert directives["signal"] == "TERM@300"  # to the processes, not to this script
    assert {"nodes", "requeue", "time", "open-mode"} <= directives.keys()


@pytest.mark.parametrize(
    ("code", "restarts", "queued_again"),
    [(0, "0", False), (75, "0", True), (137, "3", True), (1, "0", False), (2, "0", False), (75, "20", False)],
)
def test_slurm_queues_again_what_goes_on(tmp_path: Path, code: int, restarts: str, queued_again: bool) -> None:
    done = run_launcher(tmp_path, "launch_slurm", "run_dir=r", "a=b c", CODE=str(code), SLURM_RESTART_COUNT=restarts)
    assert done.returncode == code, done.stderr
    assert "srun: --kill-on-bad-exit=0 --wait=120 venv/bin/tpu-train run_dir=r a=b c" in done.stdout
    assert ("scontrol: requeue 7" in done.stdout) == queued_again


def test_xpk_is_given_the_words_of_tpu_train(tmp_path: Path) -> None:
    done = run_launcher(tmp_path, "launch_xpk", "one", "v5litepod-16", "run_dir=r", "a=b c", CLUSTER="c", IMAGE="i")
    words = shlex.split(done.stdout)
    assert done.returncode == 0, done.stderr
    assert words[1:3] == ["workload", "create"]
    assert {"--cluster", "--docker-image", "--workload", "--tpu-type", "--num-slices", "--command"} <= set(words)
    assert "--command tpu-train run_dir=r a=b\\ c" in done.stdout


@pytest.mark.parametrize(("name", "words"), [("launch_slurm", ["a=b"]), ("launch_xpk", ["one", "v5litepod-16", "a=b"])])
def test_a_launcher_wants_a_run_folder_to_go_on_with(tmp_path: Path, name: str, words: list[str]) -> None:
    done = run_launcher(tmp_path, name, *words, CLUSTER="c", IMAGE="i")
    assert done.returncode == 2
    assert "run_dir=FOLDER" in done.stderr


def test_the_jobset_starts_one_process_on_each_host_of_a_slice() -> None:
    (jobset,) = yaml.safe_load_all((SCRIPTS / "launch_gke.yaml").read_text(encoding="utf-8"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    x, y = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert spec["parallelism"] == spec["completions"] == x * y // chips
    assert (spec["completionMode"], spec["backoffLimit"], pod["restartPolicy"]) == ("Indexed", 0, "Never")
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_jobset_restarts_as_a_whole_but_for_what_is_refused() -> None:
    (jobset,) = yaml.safe_load_all((SCRIPTS / "launch_gke.yaml").read_text(encoding="utf-8"))
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": "tpu-train", "operator": "In", "values": [2]}
    assert spec["template"]["spec"]["containers"][0]["name"] == "tpu-train"


def test_the_words_of_the_jobset_are_a_configuration() -> None:
    (jobset,) = yaml.safe_load_all((SCRIPTS / "launch_gke.yaml").read_text(encoding="utf-8"))
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    run = compose(container["args"]).run
    assert run.run_dir is not None
    assert run.run_dir.startswith(container["volumeMounts"][0]["mountPath"] + "/")


def run_launcher(tmp_path: Path, name: str, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("srun", "scontrol", "xpk"):
        (tools / tool).write_text(FAKE, encoding="utf-8")
        (tools / tool).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "_environment").write_text("VENV=venv\nensure_environment() { :; }\n", encoding="utf-8")
    known = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", SCRIPTS / name, *words], env={**known, **environ}, text=True, capture_output=True, check=False
    )
