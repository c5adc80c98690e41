"""What a person sees: a line that renews itself on a terminal, plain lines elsewhere."""

import logging
import os
import pty
import sys
from typing import Any

import pytest

from tpu_train.training.console import console_logging, describe_step, reporter

RECORD: dict[str, Any] = {"step": 20, "loss": 2.5, "tokens_per_s": 12345.6, "mfu": 0.515}


def test_a_step_in_one_line() -> None:
    assert describe_step(RECORD, 300, 125.4) == "step 20/300  loss 2.5000  12,346 tokens/s  MFU 51.5%  left 2:05"


def test_plain_lines_come_every_log_every_steps_and_first_and_last(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with reporter(steps=7, log_every=3) as plain:
        for step in range(1, 8):
            plain.step({**RECORD, "step": step}, 1.0)
    assert [record.message.split("  ")[0] for record in caplog.records] == [f"step {i}/7" for i in (1, 3, 6, 7)]


def test_a_terminal_gets_a_line_that_renews_itself_below_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with os.fdopen(child, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with console_logging(), reporter(steps=300, log_every=10) as progress:
            logging.getLogger("tpu_train.test").info("above the line")
            progress.step(RECORD, 125.4)
        shown = os.read(parent, 100_000).decode()
    os.close(parent)
    assert "above the line" in shown
    assert "step 20/300  loss 2.5000" in shown
    assert "\x1b[2K" in shown  # the line is erased and written anew
