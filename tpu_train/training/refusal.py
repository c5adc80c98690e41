"""Tells the other processes of a run that this one's configuration is refused: they would wait for it.

Key idea: who the others are is part of the same configuration, and mostly sound where something else is wrong.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from tpu_train.config.compose import draft
from tpu_train.config.overrides import parse, within
from tpu_train.config.problems import ConfigError
from tpu_train.config.rules import rules
from tpu_train.config.schema import Run, Runtime
from tpu_train.execution.distributed import find_cluster, tell_refusal

_TELLING = ("runtime.coordinator", "runtime.num_processes", "runtime.process_id", "runtime.platform")


def tell_others(refused: ConfigError, overrides: Sequence[str], config_dir: Path | None) -> None:
    """Returns when the others know, or did not come; at once where this process is alone or cannot find them.

    Args:
        refused: why.
        overrides: command-line words.
        config_dir: a folder of the user's own YAML.
    """
    runtime = _runtime_of(overrides, config_dir)
    if runtime is not None:
        tell_refusal(find_cluster(runtime, os.environ), "; ".join(map(str, refused.problems)))


def _runtime_of(overrides: Sequence[str], config_dir: Path | None) -> Runtime | None:
    """What is configured of the processes; None where it is not sound."""
    words, problems = parse(overrides, Run)
    try:
        composed, more = draft(words, config_dir)
    except ConfigError:  # nothing can be composed, but perhaps these
        try:
            composed, more = draft([word for word in words if within(word.key, "runtime")], None)
        except ConfigError:
            return None
    about = [key for problem in (*problems, *more) for key in problem.keys]
    about += [problem.place for problem in rules(composed.run)]
    wrong = any(within(key, other) or within(other, key) for key in _TELLING for other in about)
    return None if wrong else composed.run.runtime
