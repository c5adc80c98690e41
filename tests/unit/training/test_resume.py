"""A run that is interrupted goes on as if nothing had happened; what cannot be gone on from is refused or said."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.test_train_command import TINY, metrics_of, tpu_train
from tpu_train.checking import compose_checked
from tpu_train.config.problems import ConfigError
from tpu_train.training.checkpoints import Checkpoints
from tpu_train.training.saved_run import SavedRun
from tpu_train.training.trainer import train

TIMES = {"step_time_s", "data_wait_s", "tokens_per_s", "model_tflops_per_s", "mfu", "mfu_causal", "peak_memory_bytes"}
REAL = [*[word for word in TINY if word != "data=synthetic"], "data=stdlib"]


def run(*words: str) -> int:
    return train(compose_checked([*TINY, *words]))


def lines(folder: Path) -> list[dict[str, Any]]:
    """The metrics without what depends on time and memory."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in metrics_of(folder)]


def tensors(folder: Path, step: int | None = None) -> dict[str, Any]:
    saved = SavedRun(folder)
    return saved.describe(saved.step(step))["tensors"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_forty_steps_are_twenty_and_twenty_more(num_workers: int, tmp_path: Path) -> None:
    words = [*REAL, "model.dropout=0.1", f"data.num_workers={num_workers}", "data.shuffle=documents"]
    words += ["validation.steps=1", "validation.every=15", "checkpoint.every=10"]

    def start(name: str, steps: int) -> int:
        return train(compose_checked([*words, f"run_dir={name}", f"training.steps={steps}"]))

    assert start("straight", 40) == 0
    assert start("parts", 20) == 0
    assert start("parts", 40) == 0
    assert lines(tmp_path / "parts") == lines(tmp_path / "straight")
    assert tensors(tmp_path / "parts") == tensors(tmp_path / "straight")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").rglob("*")}
    assert start("parts", 40) == 0  # finished: nothing is written
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "parts").rglob("*")} == before
    described = tpu_train("show", "checkpoint", "run_dir=parts", "--json", cwd=tmp_path)
    found = json.loads(described.stdout)
    assert found["step"] == 40
    assert found["data_position"] == 160
    assert found["tensors"] == tensors(tmp_path / "straight", 40)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 75)])
def test_signal_ends_the_run_with_a_checkpoint_and_the_command_that_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    process = started(*TINY, "training.steps=100000", "run_dir=r", cwd=tmp_path)
    wait_for_step(tmp_path / "r", 3)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    (step,) = Checkpoints(tmp_path / "r").steps()
    recorded = [line["step"] for line in metrics_of(tmp_path / "r")]
    assert recorded == list(range(1, step + 1))
    assert err.splitlines()[-1].endswith("training.steps=100000 run_dir=r")
    assert "stopped; go on with: tpu-train model=qwen3_debug" in err
    assert run("run_dir=r", f"training.steps={step + 2}") == 0
    assert len(metrics_of(tmp_path / "r")) == step + 2


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom tpu_train.training.checkpoints import Checkpoints\n"
        "Checkpoints.save = lambda *_: time.sleep(600)\n"
        "from tpu_train.cli import main\nmain()\n"
    )
    (tmp_path / "slow.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, "slow.py", *TINY, "training.steps=100000", "run_dir=r"],
        stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    wait_for_step(tmp_path / "r", 3)
    process.terminate()
    time.sleep(2)
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert "SIGTERM again: ending at once" in err


def test_signal_while_compiling_ends_at_once_with_nothing_to_save(tmp_path: Path) -> None:
    process = started(*TINY, "training.steps=5", "run_dir=r", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not (tmp_path / "r" / "log.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=10)
    assert process.returncode == 75, err
    assert "SIGTERM before the first step: nothing to save" in err
    assert "go on with: tpu-train" in err


def test_maximum_wall_time_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run("run_dir=r", "training.steps=1000000", "training.max_time=8s") == 75
    assert "stopping after step" in caplog.text
    assert Checkpoints(tmp_path / "r").steps()[-1] == metrics_of(tmp_path / "r")[-1]["step"]


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    words = ["training.steps=5000", "checkpoint.every=1s", "checkpoint.keep_last=100"]
    assert run("run_dir=r", *words) == 0
    steps = Checkpoints(tmp_path / "r").steps()
    assert len(steps) >= 2
    assert steps[-1] == 5000


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tpu_train.cli", *words]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd)


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    path = folder / "metrics.jsonl"
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().count("\n") >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} did not come")


def kill_and_resume(folder: Path, kills: int, seed: int) -> None:
    """Kills runs that save often at random moments, until they have been killed so often, then lets one finish."""
    rng = random.Random(seed)
    steps = 40 + 60 * kills
    words = [*REAL, f"training.steps={steps}", "checkpoint.every=3", "checkpoint.keep_last=2"]
    assert train(compose_checked([*words, "run_dir=undisturbed"])) == 0
    for _ in range(kills):
        before = len(metrics_of(folder / "r")) if (folder / "r" / "metrics.jsonl").exists() else 0
        process = started(*words, "run_dir=r", cwd=folder)
        wait_for_step(folder / "r", min(before - 3, steps - 60) if before else 1)
        time.sleep(rng.uniform(0, 0.5))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    done = tpu_train(*words, "run_dir=r", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert lines(folder / "r") == lines(folder / "undisturbed")
    assert tensors(folder / "r", steps) == tensors(folder / "undisturbed", steps)


def test_killed_runs_finish_with_the_tensors_of_the_undisturbed_one(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=3, seed=0)


@pytest.mark.full
def test_fifty_kills_leave_no_trace(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=50, seed=1)


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> Path:
    assert run("run_dir=r", "training.steps=6", "checkpoint.every=3") == 0
    assert Checkpoints(tmp_path / "r").steps() == [3, 6]
    return tmp_path / "r"


def spoil(checkpoint: Path, how: str) -> Path:
    file = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    if how == "missing":
        file.unlink()
    else:
        middle = len(content) // 2
        bad = content[:middle] if how == "truncated" else content[:middle] + b"\0\1\2\3" + content[middle + 4 :]
        file.write_bytes(bad)
    return file


@pytest.mark.parametrize(
    ("how", "message"),
    [("truncated", "bytes, "), ("corrupt", "its contents are not what was written"), ("missing", "is missing")],
)
def test_bad_checkpoint_is_passed_over_by_auto_and_refused_by_name(
    how: str, message: str, two_checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = spoil(two_checkpoints / "checkpoints" / "6", how)
    with pytest.raises(ConfigError) as caught:
        run("run_dir=r", "training.steps=6", "checkpoint.resume=6")
    assert f"step 6 cannot be used: {file}: " in str(caught.value)
    assert message in str(caught.value)
    assert run("run_dir=r", "training.steps=6", "checkpoint.every=3") == 0
    assert "the checkpoint of step 6 is passed over" in caplog.text
    assert "going on after step 3" in caplog.text
    assert [line["step"] for line in metrics_of(two_checkpoints)] == [1, 2, 3, 4, 5, 6]


def test_step_that_is_not_there_is_refused_with_those_that_are(two_checkpoints: Path) -> None:
    with pytest.raises(ConfigError, match=r"r has no checkpoint of step 4; those there are: 3, 6"):
        run("run_dir=r", "checkpoint.resume=4")
    with pytest.raises(ConfigError, match=r"r holds a run already and checkpoint.resume is never"):
        run("run_dir=r", "checkpoint.resume=never")
    with pytest.raises(ConfigError, match=r"model.num_layers was 1 and is now 2, which the weights in r do not fit"):
        run("run_dir=r", "model.num_layers=2")
    assert [line["step"] for line in metrics_of(two_checkpoints)] == [1, 2, 3, 4, 5, 6]


def test_going_on_from_an_earlier_step_sets_the_later_ones_aside(
    two_checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run("run_dir=r", "training.steps=5", "checkpoint.resume=3", "optimizer.lr=1e-2") == 0
    assert "changed since the checkpoint: optimizer.lr was 0.001 and is now 0.01" in caplog.text
    assert Checkpoints(two_checkpoints).steps() == [3, 5]
    assert (two_checkpoints / "checkpoints" / "6-replaced" / "files.json").exists()
    assert [line["step"] for line in metrics_of(two_checkpoints)] == [1, 2, 3, 4, 5]


def test_another_batch_size_goes_on_in_the_data_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [*REAL, "run_dir=r"]
    assert train(compose_checked([*words, "training.steps=4"])) == 0
    words = [word for word in words if not word.startswith("training.batch_per_device")]
    assert train(compose_checked([*words, "training.steps=6", "training.global_batch_size=6"])) == 0
    assert "training.global_batch_size was null and is now 6" in caplog.text
    assert SavedRun(tmp_path / "r").describe(6)["data_position"] == 4 * 4 + 2 * 6


def test_old_checkpoints_go_and_those_of_keep_every_stay(tmp_path: Path) -> None:
    words = ["run_dir=r", "training.steps=12", "checkpoint.every=2", "checkpoint.keep_every=6"]
    assert run(*words, "checkpoint.keep_last=1") == 0
    assert Checkpoints(tmp_path / "r").steps() == [6, 12]


@pytest.mark.parametrize(("on_error", "code", "last_step"), [("continue", 1, 6), ("stop", 1, 3)])
def test_full_disk_leaves_earlier_checkpoints_usable(on_error: str, code: int, last_step: int, tmp_path: Path) -> None:
    assert run("run_dir=r", "training.steps=2") == 0
    script = (
        "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from tpu_train.cli import main\nmain()\n"
    )
    (tmp_path / "small.py").write_text(script)
    words = [*TINY, "run_dir=r", "training.steps=6", "checkpoint.every=3", f"checkpoint.on_error={on_error}"]
    done = subprocess.run(
        [sys.executable, "small.py", *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    assert "ERROR the checkpoint of step 6 cannot be written" in done.stderr or on_error == "stop"
    assert "cannot be written" in done.stderr
    assert metrics_of(tmp_path / "r")[-1]["step"] >= last_step
    assert Checkpoints(tmp_path / "r").newest_whole() == 2
    assert run("run_dir=r", "training.steps=6") == 0
    assert [line["step"] for line in metrics_of(tmp_path / "r")] == [1, 2, 3, 4, 5, 6]


def test_torn_last_line_is_dropped(two_checkpoints: Path) -> None:
    path = two_checkpoints / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 7, "lo')
    assert run("run_dir=r", "training.steps=8") == 0
    assert [line["step"] for line in metrics_of(two_checkpoints)] == list(range(1, 9))


def test_another_number_of_cores_is_reported(
    two_checkpoints: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tpu_train.training.loop.num_cores", lambda: 96)
    assert run("run_dir=r", "training.steps=7") == 0
    assert "cores and there are 96 now: XLA repeats a run bit by bit only on the same number" in caplog.text


def test_start_from_the_weights_of_another_run(two_checkpoints: Path, tmp_path: Path) -> None:
    assert run("run_dir=new", "training.steps=1", "checkpoint.init_from=r", "optimizer.lr=0") == 0
    old, new = tensors(two_checkpoints), tensors(tmp_path / "new")
    assert all(new[name] == tensor for name, tensor in old.items() if name.startswith("params."))
    with pytest.raises(ConfigError, match=r"model.ffn_dim is 32, in r it is 64"):
        run("run_dir=other", "checkpoint.init_from=r", "model.ffn_dim=32")
    with pytest.raises(ConfigError, match=r"nowhere is not a run folder"):
        run("run_dir=other", "checkpoint.init_from=nowhere")
    assert not (tmp_path / "other").exists()
