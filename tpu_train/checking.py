"""Joins the rules of all stages, and measures a model without allocating it, for `tpu-train check` and every start.

Each stage exports `rules(run) -> list[Problem]`; what they need to know is theirs, that they are all asked is seen to
here.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tpu_train.config import rules as config_rules
from tpu_train.config.compose import Composed, draft, in_order
from tpu_train.config.overrides import Word, parse, within
from tpu_train.config.problems import ConfigError, Problem, located
from tpu_train.config.schema import Run
from tpu_train.data import rules as data_rules
from tpu_train.graph import rules as graph_rules
from tpu_train.kernels import rules as kernel_rules
from tpu_train.objectives.flops import flops_per_token
from tpu_train.sharding import rules as sharding_rules
from tpu_train.training import rules as training_rules
from tpu_train.training.build import build_model

# Later stages' rules join here, in the order of DESIGN's layout.
RULES: tuple[Callable[[Run], list[Problem]], ...] = (
    config_rules.rules,
    kernel_rules.rules,
    sharding_rules.rules,
    graph_rules.rules,
    data_rules.rules,
    training_rules.rules,
)


def compose_checked(overrides: Sequence[str], config_dir: Path | None = None) -> Composed:
    """Compose the configuration and ask all rules.

    Args:
        overrides: command-line words.
        config_dir: a folder of the user's own YAML.

    Raises:
        ConfigError: with every problem, of single values and of their combination, in the order of the words.
    """
    words, problems = parse(overrides, Run)
    composed, more = judge(words, config_dir, problems)
    if more:
        raise ConfigError(in_order(more, overrides))
    return composed


def judge(
    words: Sequence[Word], config_dir: Path | None, problems: Sequence[Problem] = (), multirun: bool = False
) -> tuple[Composed, list[Problem]]:
    """Compose parsed words and ask all rules that do not depend on a value that is refused.

    Args:
        words: without sweeps.
        config_dir: a folder of the user's own YAML.
        problems: what is known to be wrong already, with the keys that it is about.
        multirun: whether settings of a sweep take effect.

    Returns:
        The configuration, and all problems; it is of use where there are none.

    Raises:
        ConfigError: nothing could be composed.
    """
    try:
        composed, found = draft(words, config_dir, multirun)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    found = [*problems, *found]
    unknown = [key for problem in found for key in problem.keys]
    return composed, [*found, *check(composed.run, composed.sources, unknown)]


def check(run: Run, sources: Mapping[str, str] = MappingProxyType({}), unknown: Sequence[str] = ()) -> list[Problem]:
    """Everything that keeps a converted config from being run.

    Args:
        run: the config.
        sources: where each dotted key was set; a problem whose place is such a key gets that place.
        unknown: dotted keys and sections whose value is not known; rules that compare them are not told.
    """
    problems = [problem for rules in RULES for problem in rules(run)]
    known = [problem for problem in problems if not _touches(problem, unknown)]
    return [located(problem, sources) for problem in known]


def _touches(problem: Problem, unknown: Sequence[str]) -> bool:
    about = (problem.place, *problem.keys)
    return any(within(key, other) or within(other, key) for key in about for other in unknown)


def measure(run: Run) -> dict[str, Any]:
    """Build the model, on the meta device, and count; nothing is allocated.

    Returns:
        parameters, trainable_parameters, flops_per_token ("full" convention), flops_per_token_causal, seq_len,
        global_batch_size (sequences), tokens_per_step.
    """
    model = build_model(run.model)
    flops = flops_per_token(model, run.training.seq_len)
    sequences = config_rules.global_batch_size(run)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "flops_per_token": flops.full,
        "flops_per_token_causal": flops.causal,
        "seq_len": run.training.seq_len,
        "global_batch_size": sequences,
        "tokens_per_step": sequences * run.training.seq_len,
    }
