"""A sharding plan: data that says, by path, how a model's parameters and activations are laid over the mesh.

Key idea: the model knows nothing of it. Parameters are found by full name and modules by path, both with `*` for one
part of a path; what no rule names is laid out by `layout.lay_out`'s own rule and computed as it stands.

Activations between the modules that a plan names are split along the sequence over the axis `tensor`. A module that
starts a tensor-parallel region gathers its input, one that ends it sums its output and keeps its part of the sequence.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

from tpu_train.models.node import matches

Rule = TypeVar("Rule")


@dataclasses.dataclass(frozen=True)
class ParameterRule:
    """How one parameter is laid out.

    Attributes:
        tensor_dim: dimension split over `tensor`; None: a copy on each device, whose gradients are summed.
        unit: rows that stay together, those of an attention head.
        query_heads: of a key or value projection, whose units are its heads: the number of query heads that share
            them. Where `tensor` does not divide the units, each device holds all and uses those its query heads need.
        fsdp_dim: dimension split over `fsdp`; "auto": by the rule of `lay_out`; None: none.
        expert_dim: dimension that counts experts, split over `expert` and used so; it must divide it.
    """

    tensor_dim: int | None = None
    unit: int = 1
    query_heads: int | None = None
    fsdp_dim: int | Literal["auto"] | None = "auto"
    expert_dim: int | None = None


# What a module of a plan does with its activations, [B, S, ...] in and out:
# * gather_input: the first argument arrives as part of the sequence and is gathered.
# * scatter_output: each device has a part of the sum; it is summed and each keeps its part of the sequence.
# * gather_output: the result is a part of the sequence and is gathered.
# * vocabulary: an embedding whose rows are split: each device looks up those it has, then as scatter_output.
# * experts: stacked experts, whose sorted rows go to the device along `expert` that has their expert, and back.
ModuleRule = Literal["gather_input", "scatter_output", "gather_output", "vocabulary", "experts"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rules by path.

    Attributes:
        parameters: pattern of full names to rule.
        modules: pattern of paths to rule, for `tensor` and `expert`; without any the model cannot be split over them.
        dense_over_expert: parameters without `expert_dim` are split over `fsdp` and `expert` together; else they are
            split over `fsdp` and copies along `expert`.
        vocabulary: the parameter whose first dimension is the logits' vocabulary; None: logits are whole.
    """

    parameters: Mapping[str, ParameterRule] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, ModuleRule] = dataclasses.field(default_factory=dict)
    dense_over_expert: bool = True
    vocabulary: str | None = None


NO_RULE = ParameterRule()
NO_PLAN = Plan()


def find_rules(rules: Mapping[str, Rule], paths: Sequence[str]) -> dict[str, Rule]:
    """The rule of each path that has one.

    Raises:
        ValueError: a pattern fits nothing, or two fit one path.
    """
    found: dict[str, tuple[str, Rule]] = {}
    for pattern, rule in rules.items():
        fitting = [path for path in paths if matches(pattern, path)]
        if not fitting:
            raise ValueError(f"sharding plan: {pattern} fits none of the model's {', '.join(paths[:8])}, ...")
        for path in fitting:
            if path in found:
                raise ValueError(f"sharding plan: {path} fits both {found[path][0]} and {pattern}")
            found[path] = (pattern, rule)
    return {path: rule for path, (_, rule) in found.items()}
