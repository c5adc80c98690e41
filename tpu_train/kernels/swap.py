"""Swaps: which component of a model becomes which, before the model is constructed.

Key idea: a swap is data: the type that it replaces, at which paths, by what, with which options. It rewrites the config
tree; a foreign module, which has none, gets its submodules replaced by type and path. One that matches nothing, or two
that match one node, are errors: a name in a config takes effect or is refused.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from tpu_train.models.node import Node, matches


@dataclasses.dataclass(frozen=True)
class Swap:
    """One rule.

    Attributes:
        name: for messages, such as `kernels.attention=splash`.
        replaces: the component that is replaced.
        by: what constructs its replacement, of the options and (in a config tree) the arguments of the replaced node.
        paths: pattern of the paths at which it is, `*` for one part of a path; "**" for all.
        options: further arguments of `by`.
    """

    name: str
    replaces: type[nn.Module]
    by: Callable[..., nn.Module]
    paths: str = "**"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def fits(self, path: str, component: Any) -> bool:
        """Whether it replaces what is at a path."""
        return component is self.replaces and (self.paths == "**" or matches(self.paths, path))


def rewrite(tree: Node, swaps: Sequence[Swap]) -> Node:
    """The config tree with every swap made.

    Raises:
        ValueError: a swap that matches nothing, or two that match one node.
    """
    _check({path: node.component for path, node in tree.walk()}, swaps)

    def rule(path: str, node: Node) -> Node | None:
        for swap in swaps:
            if swap.fits(path, node.component):
                return Node(swap.by, {**node.arguments, **swap.options})
        return None

    return tree.rewrite(rule)


def replace_modules(model: nn.Module, swaps: Sequence[Swap]) -> None:
    """Makes the swaps in a constructed module, in place; a replacement is made of the options alone.

    Raises:
        ValueError: a swap that matches nothing, or two that match one module.
    """
    modules = dict(model.named_modules())
    _check({path: type(module) for path, module in modules.items()}, swaps)
    for path, module in modules.items():
        for swap in swaps:
            if path and swap.fits(path, type(module)):
                parent, _, name = path.rpartition(".")
                setattr(modules[parent], name, swap.by(**swap.options))


def _check(components: Mapping[str, Any], swaps: Sequence[Swap]) -> None:
    for swap in swaps:
        if not any(swap.fits(path, component) for path, component in components.items()):
            kinds = sorted({getattr(component, "__name__", str(component)) for component in components.values()})
            raise ValueError(
                f"{swap.name} replaces {swap.replaces.__name__} at {swap.paths}, which the model does not have; it has "
                f"{', '.join(kinds)}"
            )
    for path, component in components.items():
        found = [swap.name for swap in swaps if swap.fits(path, component)]
        if len(found) > 1:
            raise ValueError(f"{path} is replaced by {' and by '.join(found)}; leave one out or give them other paths")


def load(path: str) -> Any:
    """What a dotted path from a config names: `package.module.Name`.

    Raises:
        ValueError: there is no such thing.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be imported: {error}; give package.module.Name of what is on sys.path"
        ) from None
