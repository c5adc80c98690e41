"""Sweeps on the real command line, and their jobs' ends with a stand-in for the training process."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.unit.training.test_train_command import TINY, metrics_of, tpu_train
from tpu_train.config.problems import ConfigError
from tpu_train.sweeps import jobs
from tpu_train.sweeps.record import reserved
from tpu_train.sweeps.sweep import Result, print_table, sweep

SHORT = [*TINY, "training.steps=3"]

# Answers to the optimizer's rate: ends as a training would, at once.
STAND_IN = """
    import json, os, pathlib, signal, sys, time
    from hydra.core.override_parser.overrides_parser import OverridesParser
    words = [word for word in sys.argv[1:] if "=" in word]
    values = {word.key_or_group: word.value() for word in OverridesParser.create().parse_overrides(words)}
    folder, lr = pathlib.Path(values["run_dir"]), values["optimizer.lr"]
    assert folder.is_dir()
    with open(folder / "metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"step": 1, "loss": lr}) + chr(10))
    with open("started.txt", "a") as started:
        started.write(f"{lr} {time.time()} {os.environ.get('MARK')}" + chr(10))
    if lr == 2:
        print("RuntimeError: lr is two", file=sys.stderr)
        sys.exit(1)
    if lr == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    if lr == 75 and not pathlib.Path("again").exists():
        sys.exit(75)
    if lr in (30, 31):  # as a training: saves at the first signal, ends at once at the second
        def save(number, _):
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, lambda number, _: sys.exit(128 + number))
            if lr == 30:
                sys.exit(75)
            time.sleep(30)
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, save)
        pathlib.Path("ready").touch()
        time.sleep(30)
    time.sleep(0.5 if values.get("training.steps") == 7 else 0)
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "stand_in.py"
    script.write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setattr(jobs, "_COMMAND", (sys.executable, str(script)))
    (tmp_path / "main.py").write_text(
        "import sys\nfrom tpu_train.sweeps import jobs\n"
        f"jobs._COMMAND = (sys.executable, {str(script)!r})\n"
        "from tpu_train.cli import main\nmain()\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command_line(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The real command line with the stand-in for its jobs."""
    command = [sys.executable, "main.py", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def statuses(result: Result) -> list[str]:
    return [outcome.status for outcome in result.outcomes]


def starts(folder: Path) -> list[str]:
    return [line.split()[0] for line in (folder / "started.txt").read_text().splitlines()]


def test_each_job_ends_for_itself_and_the_table_says_how(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = sweep(["optimizer.lr=1,2,9,4"], None)
    assert statuses(result) == ["done", "failed", "killed", "done"]
    assert result.exit_code == 1
    assert [outcome.loss for outcome in result.outcomes] == [1, 2, 9, 4]
    assert [Path(outcome.folder).name for outcome in result.outcomes] == ["0", "1", "2", "3"]
    print_table(result)
    rows = capsys.readouterr().out.splitlines()
    (row,) = [row for row in rows if "optimizer.lr=2" in row]
    assert "failed" in row
    assert "RuntimeError: lr is two" in row
    assert any("killed by SIGKILL" in row for row in rows)
    assert (Path(result.outcomes[1].folder) / "console.txt").read_text() == "RuntimeError: lr is two\n"


def test_jobs_run_side_by_side(stand_in: Path) -> None:
    result = sweep(["optimizer.lr=1,4", "training.steps=7", "hydra.launcher.n_jobs=2"], None)
    assert statuses(result) == ["done", "done"]
    times = [float(line.split()[1]) for line in (stand_in / "started.txt").read_text().splitlines()]
    assert abs(times[1] - times[0]) < 0.5  # a job takes longer


def test_preempted_job_stops_the_sweep_and_a_rerun_goes_on(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["optimizer.lr=1,75,4"]
    result = sweep(words, None)
    assert result.exit_code == 75
    assert statuses(result) == ["done", "preempted", "not started"]
    again = capsys.readouterr().err.splitlines()[-1]
    assert again == f"stopped; go on with: tpu-train optimizer.lr=1,75,4 -m hydra.sweep.dir={result.folder}"
    (stand_in / "again").touch()
    rerun = sweep([*words, f"hydra.sweep.dir={result.folder}"], None)
    assert rerun.exit_code == 0
    assert statuses(rerun) == ["done", "done", "done"]
    assert starts(stand_in) == ["1", "75", "75", "4"]  # the first was not run again
    assert len((result.folder / "1" / "metrics.jsonl").read_text().splitlines()) == 2  # it went on in its folder
    assert sweep([*words, f"hydra.sweep.dir={result.folder}"], None).exit_code == 0
    assert len(starts(stand_in)) == 4
    with pytest.raises(ConfigError, match=r"holds a sweep of optimizer.lr=1,75,4; choose another folder"):
        sweep(["optimizer.lr=1,4", f"hydra.sweep.dir={result.folder}"], None)


def _signalled(folder: Path, word: str, *numbers: signal.Signals) -> tuple[int, str]:
    """Sends signals to the process of a sweep alone; gives its exit code and what it printed."""
    command = [sys.executable, "main.py", word, "-m", "hydra.sweep.dir=s"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 60
        while not (folder / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)
        out, _ = process.communicate(timeout=20)
    return process.returncode, out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_sweep_reaches_its_jobs_and_no_more_start(number: signal.Signals, stand_in: Path) -> None:
    code, out = _signalled(stand_in, "optimizer.lr=30,1", number)
    assert code == 75
    assert "preempted" in out
    assert "not started" in out
    assert "Traceback" not in out
    assert starts(stand_in) == ["30"]
    assert json.loads((stand_in / "s/sweep.json").read_text())["jobs"]["0"]["status"] == "preempted"


def test_second_signal_ends_the_jobs_at_once(stand_in: Path) -> None:
    code, out = _signalled(stand_in, "optimizer.lr=31,1", signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert "interrupted" in out
    assert "not started" in out
    assert "Traceback" not in out
    assert json.loads((stand_in / "s/sweep.json").read_text())["jobs"]["0"]["exit_code"] == 130


def test_refused_sweep_leaves_no_folder(stand_in: Path) -> None:
    words = ["hydra.sweeper.max_batch_size=1", "optimizer.lr=1,4"]
    for wrong in ("${oc.env:HOME}", "${model.dim}", "..", "x"):
        with pytest.raises(ConfigError):
            sweep(["hydra.sweep.dir=out/here", f"hydra.sweep.subdir={wrong}", *words[wrong != "x" :]], None)
        if wrong != "x":
            assert not (stand_in / "out").exists()
    assert (stand_in / "out/here/x/metrics.jsonl").exists()  # the first batch had run
    assert [name for name in os.listdir(stand_in) if name == "runs"] == []


def test_damaged_record_says_what_to_do(stand_in: Path) -> None:
    (stand_in / "s").mkdir()
    for text in ("{", "[]", "", '{"overrides": 5, "jobs": {}}', '{"overrides": [], "jobs": {"0": {}}}'):
        (stand_in / "s/sweep.json").write_text(text)
        with pytest.raises(ConfigError, match=r"s/sweep.json: is damaged \(\w+\); remove it to run all jobs anew, or"):
            sweep(["optimizer.lr=1", "hydra.sweep.dir=s"], None)
    assert (stand_in / "s").is_dir()  # it is the user's


def test_sweep_goes_on_with_other_processes_but_not_with_other_yaml(stand_in: Path) -> None:
    for name in ("a", "b"):
        (stand_in / name / "recipe").mkdir(parents=True)
        (stand_in / name / "recipe/mine.yaml").write_text("# @package _global_\n")
    words = ["recipe=mine", "optimizer.lr=1,4", "hydra.sweep.dir=s"]
    sweep(words, Path("a"))
    assert sweep([*words, "hydra.launcher.n_jobs=2"], stand_in / "a").exit_code == 0
    assert len(starts(stand_in)) == 2
    with pytest.raises(ConfigError, match=r"holds a sweep of recipe=mine optimizer.lr=1,4 --config-dir \S+/a; choose"):
        sweep(words, Path("b"))


def test_folder_of_a_job_may_be_asked_of_hydras_resolver(stand_in: Path) -> None:
    result = sweep(["optimizer.lr=1,4", "hydra.sweep.dir=s", "hydra.sweep.subdir='job ${hydra:job.num}'"], None)
    assert [outcome.folder for outcome in result.outcomes] == ["s/job 0", "s/job 1"]


def test_settings_of_the_sweep_take_effect(stand_in: Path) -> None:
    words = ["optimizer.lr=1,4", "hydra.sweep.dir=out/here", "hydra.sweep.subdir='lr ${optimizer.lr}'"]
    result = sweep([*words, "hydra.sweeper.max_batch_size=1", "+hydra.job.env_set.MARK=x"], None)
    assert [outcome.folder for outcome in result.outcomes] == ["out/here/lr 1", "out/here/lr 4"]
    assert sweep(["hydra/launcher=basic", "optimizer.lr=1,2"], None).exit_code == 1
    recipe = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      optimizer.lr: '1,4'\n"
    (stand_in / "own/recipe").mkdir(parents=True)
    (stand_in / "own/recipe/mine.yaml").write_text(recipe)
    params = sweep(["recipe=mine"], stand_in / "own")
    assert [outcome.overrides[0] for outcome in params.outcomes] == ["optimizer.lr=1", "optimizer.lr=4"]


def test_jobs_of_one_folder_are_refused(stand_in: Path) -> None:
    with pytest.raises(ConfigError, match=r"hydra.sweep.subdir: jobs of this sweep share the folder out/x"):
        sweep(["optimizer.lr=1,4", "hydra.sweep.dir=out", "hydra.sweep.subdir=x"], None)
    assert not (stand_in / "started.txt").exists()


def test_sweeps_share_no_folder(stand_in: Path) -> None:
    with reserved("runs/a", False) as first, reserved("runs/a", False) as second:
        assert (str(first), str(second)) == ("runs/a", "runs/a-2")
    with (
        reserved("runs/b", True),
        pytest.raises(ConfigError, match=r"hydra.sweep.dir: another sweep runs in runs/b"),
        reserved("runs/b", True),
    ):
        pass


def test_optuna_searches_and_is_told_of_failures(stand_in: Path) -> None:
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=2"]
    words += ["hydra.sweeper.sampler.seed=0", "hydra.sweep.dir=s"]
    done = command_line(stand_in, *words, "optimizer.lr=choice(1,4)", "-m", "--json")
    assert done.returncode == 0, done.stderr
    assert [job["status"] for job in json.loads(done.stdout)["jobs"]] == ["done"] * 4
    best = (stand_in / "s" / "optimization_results.yaml").read_text()
    assert "  optimizer.lr: 1" in best
    assert "best_value: 1.0" in best
    ran = len(starts(stand_in))
    again = command_line(stand_in, *words, "optimizer.lr=choice(1,4)", "-m")
    assert again.returncode == 0, again.stderr
    assert len(starts(stand_in)) == ran  # a fixed seed draws the same jobs, and these are done
    failed = command_line(stand_in, *words[:-1], "optimizer.lr=choice(2)", "-m", "--json")
    assert failed.returncode == 1
    assert {job["status"] for job in json.loads(failed.stdout)["jobs"]} == {"failed"}


def test_two_values_leave_two_folders_and_the_parent_imports_no_jax(tmp_path: Path) -> None:
    code = (
        "import sys, tpu_train.cli as cli\ntry:\n    cli.main(sys.argv[1:])\n"
        "finally:\n    print('jax' in sys.modules, file=sys.stderr)"
    )
    words = [*SHORT, "optimizer.lr=1e-3,3e-3", "-m", "--json"]
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "False"
    found = json.loads(done.stdout)
    assert found["exit_code"] == 0
    folders = [tmp_path / job["folder"] for job in found["jobs"]]
    assert len({folder.resolve() for folder in folders}) == 2
    for folder, job, lr in zip(folders, found["jobs"], (1e-3, 3e-3), strict=True):
        lines = metrics_of(folder)
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert lines[-1]["lr"] == pytest.approx(lr)
        assert job["loss"] == lines[-1]["loss"]
        assert "run folder" in (folder / "console.txt").read_text()


def test_a_third_value_that_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    done = tpu_train(
        *SHORT, "optimizer.lr=1e-3,1e30,3e-3", "-m", "hydra.sweep.dir=s", "hydra.launcher.n_jobs=2", cwd=tmp_path
    )
    assert done.returncode == 1
    assert [len(metrics_of(tmp_path / "s" / str(number))) for number in range(3)] == [3, 2, 3]
    (row,) = [row for row in done.stdout.splitlines() if "optimizer.lr=1e+30" in row]
    assert "failed" in row
    assert "step 2 has a non-finite loss or gradient norm" in row
    assert "non-finite" in (tmp_path / "s" / "1" / "log.txt").read_text()
    assert "Traceback" not in done.stderr


def test_two_sweeps_at_once_share_nothing_and_a_killed_job_takes_none_along(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tpu_train.cli", *TINY, "-m", "--json", "hydra.launcher.n_jobs=2"]
    sweeps = [
        subprocess.Popen([*command, words, "training.steps=200"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for words in ("optimizer.lr=1e-3,2e-3", "optimizer.lr=4e-3,5e-3")
    ]
    killed = _kill_first_job(tmp_path, "optimizer.lr=0.005")
    found = [json.loads(process.communicate(timeout=300)[0]) for process in sweeps]
    assert killed
    jobs_found = [job for result in found for job in result["jobs"]]
    assert [job["status"] for job in jobs_found] == ["done", "done", "done", "killed"]
    assert jobs_found[3]["error"] == "killed by SIGKILL (out of memory?)"
    assert len({job["folder"] for job in jobs_found}) == 4
    assert [process.returncode for process in sweeps] == [0, 1]


def _kill_first_job(folder: Path, word: str) -> bool:
    """Kills the training process of an override as soon as it has its run folder."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode().split("\0")
            except OSError:
                continue
            runs = [text.removeprefix("run_dir=").strip("'") for text in words if text.startswith("run_dir=")]
            if word in words and runs and (folder / runs[0] / "log.txt").exists():
                os.kill(int(entry.parent.name), signal.SIGKILL)
                return True
        time.sleep(0.1)
    return False
