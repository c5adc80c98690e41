"""Joins the rules of all stages, and measures a model without allocating it, for `tpu-train check` and every start.

Each stage exports `rules(run) -> list[Problem]`; what they need to know is theirs, that they are all asked is seen to
here.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from tpu_train.config import rules as config_rules
from tpu_train.config.problems import Problem
from tpu_train.config.schema import Run
from tpu_train.data import rules as data_rules
from tpu_train.graph import rules as graph_rules
from tpu_train.objectives.flops import flops_per_token
from tpu_train.training.build import build_model

# Later stages' rules join here, in the order of DESIGN's layout.
RULES: tuple[Callable[[Run], list[Problem]], ...] = (
    config_rules.rules,
    graph_rules.rules,
    data_rules.rules,
)


def check(run: Run, sources: Mapping[str, str] = MappingProxyType({})) -> list[Problem]:
    """Everything that keeps a converted config from being run.

    Args:
        run: the config.
        sources: where each dotted key was set; a problem whose place is such a key gets that place.
    """
    problems = [problem for rules in RULES for problem in rules(run)]
    return [_located(problem, sources) for problem in problems]


def _located(problem: Problem, sources: Mapping[str, str]) -> Problem:
    key, message = problem.place, problem.message
    return Problem(sources.get(key, key), message if message.startswith(key) else f"{key}: {message}")


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
