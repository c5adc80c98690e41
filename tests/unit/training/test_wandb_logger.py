"""wandb in its own process: what a run shows there, and that nothing is lost or waited for when it fails."""

import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.training.fake_wandb import KEY, FakeWandb, history, offline_file, wandb_records
from tpu_train.config.schema import Wandb
from tpu_train.training import wandb_logger
from tpu_train.training.wandb_logger import Mode, WandbLogger, resolve_mode
from tpu_train.training.wandb_process import unreachable

CONFIG = {"training": {"seed": 3}, "metadata": {"ticket": "T-1"}}
STEPS = range(1, 6)


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb_settings"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def make_logger(folder: Path, mode: Mode = "auto", **values: Any) -> WandbLogger:
    folder.mkdir(exist_ok=True)
    config = Wandb(**{"mode": mode, "project": "p", "name": None, "tags": (), **values})
    return WandbLogger(config, mode, folder, CONFIG)


def log_steps(logger: WandbLogger) -> None:
    for step in STEPS:
        logger.log({"step": step, "loss": 1 / step, "mfu": 0.1 * step})


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def started(caplog: pytest.LogCaptureFixture) -> bool:
    return any(message.startswith(("wandb: http", "wandb: offline in")) for message in caplog.messages)


def assert_all_steps_offline(folder: Path) -> None:
    rows = history(offline_file(folder))
    assert [row["_step"] for row in rows] == list(STEPS)
    assert [row["loss"] for row in rows] == [1 / step for step in STEPS]
    assert [row["mfu"] for row in rows] == [0.1 * step for step in STEPS]
    assert not (folder / "wandb" / "spool.jsonl").exists()


@pytest.mark.parametrize(
    ("mode", "word", "expected"),
    [
        ("auto", None, "auto"),
        ("auto", "online", "online"),
        ("auto", "OFFLINE", "offline"),
        ("auto", "dryrun", "offline"),
        ("auto", "disabled", "disabled"),
        ("online", "disabled", "online"),
        ("disabled", "online", "disabled"),
    ],
)
def test_mode_auto_obeys_wandb_mode(mode: Mode, word: str | None, expected: str) -> None:
    assert resolve_mode(mode, {} if word is None else {"WANDB_MODE": word}) == expected


def test_an_unknown_wandb_mode_is_offline_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_mode("auto", {"WANDB_MODE": "foo"}) == "offline"
    assert caplog.messages == ["WANDB_MODE=foo is none of online, offline, disabled; wandb is offline"]


def test_without_a_key_the_run_is_offline_and_has_its_configuration(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = make_logger(tmp_path / "run", project="mine", name=None, tags=("a", "b"))
    log_steps(logger)
    logger.log({"step": 5, "loss": float("nan"), "validation_loss": 2.5, "absent": None})
    logger.close(0)
    file = offline_file(tmp_path / "run")
    (run,) = (record.run for record in wandb_records(file) if record.WhichOneof("record_type") == "run")
    assert (run.project, run.display_name, list(run.tags)) == ("mine", "run", ["a", "b"])
    assert run.run_id == (tmp_path / "run" / "wandb_run_id.txt").read_text().strip()
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert {name: config[name] for name in CONFIG} == CONFIG
    assert history(file)[-1]["validation_loss"] == 2.5
    assert "absent" not in history(file)[-1]
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert f"wandb: offline in {file.parent}; to upload it: wandb sync {file.parent}" in caplog.messages


def test_a_name_of_its_own(tmp_path: Path) -> None:
    logger = make_logger(tmp_path / "run", name="named")
    logger.close(0)
    names = [record.run.display_name for record in wandb_records(offline_file(tmp_path / "run"))]
    assert "named" in names


def test_online_without_a_key_is_offline_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = make_logger(tmp_path / "run", "online")
    log_steps(logger)
    logger.close(0)
    assert_all_steps_offline(tmp_path / "run")
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    message = "wandb: logging.wandb.mode=online has no API key; the run is offline. Log in with: wandb login"
    assert warnings == [message]


def test_a_key_that_wandb_login_left_is_found_and_the_run_is_online_and_goes_on_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeWandb() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        host = server.url.removeprefix("http://")
        (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
        for number in (1, 2):
            logger = make_logger(tmp_path / "run", name="shown", tags=("t",), project="mine")
            until(lambda: started(caplog))
            log_steps(logger)
            logger.close(0)
            assert len(server.history) == len(STEPS) * number
            caplog.clear() if number == 1 else None
    assert [row["loss"] for row in server.history[:5]] == [1 / step for step in STEPS]
    assert all("mfu" in row for row in server.history)
    kept = (tmp_path / "run" / "wandb_run_id.txt").read_text().strip()
    runs = server.of("UpsertBucket")
    assert {run["name"] for run in runs} == {kept}
    assert (runs[0]["project"], runs[0]["displayName"], runs[0]["tags"]) == ("mine", "shown", ["t"])
    assert json.loads(runs[0]["config"])["metadata"]["value"] == {"ticket": "T-1"}
    assert [asked["name"] for asked in server.of("RunResumeStatus")] == [kept, kept]
    assert f"wandb: {server.url}/someone/mine/runs/{kept}" in caplog.messages
    assert not list((tmp_path / "run" / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("WANDB_BASE_URL", "nowhere", "base_url"), ("WANDB_API_KEY", "short", "40+ characters")],
)
def test_a_wrong_value_in_the_environment_is_named_and_the_run_is_offline(
    name: str,
    value: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with FakeWandb() as server:
        for variable, word in {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, name: value}.items():
            monkeypatch.setenv(variable, word)
        logger = make_logger(tmp_path / "run")
        log_steps(logger)
        logger.close(0)
    assert_all_steps_offline(tmp_path / "run")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert reason in warning


def test_a_server_that_hangs_is_given_up_with_its_processes_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_logger, "FINISH_LIMIT_SECONDS", 1)
    ended: list[int] = []
    end = wandb_logger._Process.end

    def recorded_end(self: Any) -> None:
        ended.extend((self._process.pid, *self._children()))
        end(self)

    monkeypatch.setattr(wandb_logger._Process, "end", recorded_end)
    with FakeWandb(hangs_at="UpsertBucket") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        logger = make_logger(tmp_path / "run")
        until(lambda: server.of("UpsertBucket"))
        log_steps(logger)
        logger.close(0)
    assert_all_steps_offline(tmp_path / "run")
    assert "wandb failed: it did not finish within 1 s" in caplog.text
    assert len(ended) >= 2, "the process and wandb's service below it"
    until(lambda: not any(alive(pid) for pid in ended), seconds=5)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_server_that_hangs_at_the_start_is_given_up_during_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_logger, "START_LIMIT_SECONDS", 2)
    with FakeWandb(hangs_at="UpsertBucket") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        logger = make_logger(tmp_path / "run")
        log_steps(logger)
        until(lambda: started(caplog))
        logger.close(0)
    assert_all_steps_offline(tmp_path / "run")


def test_a_process_that_dies_in_the_middle_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = make_logger(tmp_path / "run", "auto")
    logger.log({"step": 1, "loss": 1.0, "mfu": 0.1})
    until(lambda: started(caplog))
    (pid,) = {int(child) for task in Path("/proc/self/task").iterdir() for child in children(task) if is_ours(child)}
    os.kill(pid, signal.SIGKILL)
    until(lambda: "its process ended" in caplog.text)
    for step in STEPS[1:]:
        logger.log({"step": step, "loss": 1 / step, "mfu": 0.1 * step})
    logger.close(0)
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"), key=os.path.getmtime)
    assert [row["loss"] for row in history(files[-1])] == [1 / step for step in STEPS]


def children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def is_ours(pid: str) -> bool:
    return "wandb_process.py" in Path(f"/proc/{pid}/cmdline").read_text()


def test_what_cannot_be_written_anywhere_stays_in_the_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_logger.sys, "executable", "/nonexistent")
    logger = make_logger(tmp_path / "run")
    log_steps(logger)
    logger.close(0)
    spool = tmp_path / "run" / "wandb" / "spool.jsonl"
    assert len(spool.read_text().splitlines()) == len(STEPS)
    assert f"its records are in {spool}" in caplog.text


def test_a_refusal_is_an_answer_and_silence_is_not() -> None:
    with FakeWandb() as server:
        assert unreachable(server.url) is None
    assert "cannot be reached" in (unreachable(server.url) or "")
