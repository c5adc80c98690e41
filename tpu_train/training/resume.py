"""What a run folder that exists goes on from, and what a changed configuration does to it.

Key idea: a run folder with a whole checkpoint is a run to be continued. Every key falls under one of three rules: what
the weights and moments depend on is fixed; what does not touch the training is free; all else takes the new value and
is reported with both.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tpu_train.config.convert import plain, show
from tpu_train.config.overrides import within
from tpu_train.config.problems import ConfigError, Problem, refused_at
from tpu_train.config.schema import Run
from tpu_train.execution.distributed import Processes
from tpu_train.training.checkpoints import Checkpoints

log = logging.getLogger(__name__)

FIXED = ("model", "objective.name", "optimizer.name", "precision.param")
FREE = (
    "run_dir",
    "logging",
    "checkpoint",
    "validation",
    "runtime",
    "training.log_every",
    "training.max_time",
    "training.on_nan",
    "training.inject_inf_at_step",
    "mode.check_graph",
    "model.seq_len",  # a default of training.seq_len, judged there
    "data.num_workers",
    "data.cache_dir",
)
_NO_STEP = -1  # between processes, which agree on numbers
REPORTED = ("model.dropout", "model.init_std")  # of the model, and without effect on its shapes


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        step: steps that are done.
        meta: of the checkpoint that it goes on from; None for a new run.
        finished: nothing is left to do.
        changes: what is different from the run so far, one line a key.
    """

    step: int = 0
    meta: Mapping[str, Any] | None = None
    finished: bool = False
    changes: tuple[str, ...] = ()


def find_start(run: Run, folder: Path, checkpoints: Checkpoints, processes: Processes | None = None) -> Start:
    """Decides by `checkpoint.resume` and what the folder holds; process 0 for all.

    Raises:
        ConfigError: the step is not there or not whole, the folder must be new, a fixed key changed, or a process does
            not see the folder that process 0 sees.
    """
    processes = Processes() if processes is None else processes
    before, step = _find_step(run, folder, checkpoints) if processes.is_first else (False, None)
    before, found = bool(processes.agree(int(before))), processes.agree(_NO_STEP if step is None else step)
    if found == _NO_STEP:
        changes = _changes(_saved_config(folder), run, folder) if before else ()
        return Start(changes=changes)
    if not checkpoints.path(found).is_dir():
        reason = (
            f"process {processes.index} of {processes.count} does not see {checkpoints.path(found)}, which process 0 "
            "goes on from; choose a folder that all processes share"
        )
        raise ConfigError([Problem("run_dir", reason)])
    meta = checkpoints.meta(found)
    changes = _changes(meta["config"], run, folder)
    return Start(found, meta, finished=found >= run.training.steps, changes=changes)


def _find_step(run: Run, folder: Path, checkpoints: Checkpoints) -> tuple[bool, int | None]:
    """Whether the folder holds a run, and the step to go on from."""
    wanted = run.checkpoint.resume
    steps = checkpoints.steps()
    before = (folder / "metrics.jsonl").exists() or bool(steps)
    if wanted == "never" and before:
        reason = f"{folder} holds a run already and checkpoint.resume is never; choose another folder"
        raise ConfigError([Problem("run_dir", reason)])
    if isinstance(wanted, int):
        with refused_at("checkpoint.resume"):
            step = checkpoints.require(wanted)
    else:
        step = checkpoints.newest_whole() if before else None
    return before, step


def _saved_config(folder: Path) -> Mapping[str, Any]:
    try:
        return yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # a run that was cut off before it had one


def _changes(before: Mapping[str, Any], run: Run, folder: Path) -> tuple[str, ...]:
    """One line for each key whose new value takes effect.

    Raises:
        ConfigError: with every fixed key that changed.
    """
    old, new = flat(before), flat(plain(run))
    problems, lines = [], []
    for key in sorted(old.keys() | new.keys()) if old else ():
        was, now = old.get(key), new.get(key)
        if was == now or any(within(key, free) for free in FREE):
            continue
        both = f"was {show(was)} and is now {show(now)}"
        if any(within(key, fixed) for fixed in FIXED) and key not in REPORTED:
            message = f"{key} {both}, which the weights in {folder} do not fit; choose another run_dir"
            problems.append(Problem(key, message))
        else:
            lines.append(f"{key} {both}")
    if problems:
        raise ConfigError(problems)
    return tuple(lines)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{dotted}.")
        else:
            found[dotted] = value
    return found


def cut_metrics(path: Path, step: int, validation_every: int | None) -> None:
    """Cuts metrics.jsonl back to a step, so that going on writes what an undisturbed run would have.

    Lines of later steps, a torn last line, and validation that the configuration does not ask for go.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break  # only the last line can be torn
        if record["step"] > step or not line.endswith("\n"):
            continue
        due = validation_every is not None and record["step"] % validation_every == 0
        if "validation_loss" not in record or due:
            kept.append(line)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)
