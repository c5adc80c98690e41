"""The config tree: a model as nodes that can be rewritten before anything is constructed.

Key idea: a `Node` is a constructor and its arguments, some of which are nodes; children sit at the path that their
module will have (`layers.3.attention.core`), so that a rewrite, a sharding plan and a checkpoint name one thing alike.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


@dataclasses.dataclass(frozen=True)
class Node:
    """A component not yet constructed.

    Attributes:
        component: constructor of the module. It takes child modules as plain arguments and stores each under the
            argument's name (a tuple of children as an `nn.ModuleList`), which makes a node's path its module's path.
        arguments: its keyword arguments; a `Node`, or a tuple of them, is a child.
    """

    component: Callable[..., nn.Module]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> nn.Module:
        """Constructs the module, children first."""
        return self.component(**{name: _build(value) for name, value in self.arguments.items()})

    def children(self) -> Iterator[tuple[str, "Node"]]:
        """Direct children with their paths relative to this node."""
        for name, value in self.arguments.items():
            if isinstance(value, Node):
                yield name, value
            elif isinstance(value, tuple):
                for i, item in enumerate(value):
                    if isinstance(item, Node):
                        yield f"{name}.{i}", item

    def walk(self, path: str = "") -> Iterator[tuple[str, "Node"]]:
        """Every node of the tree with its path; the root's is ""."""
        yield path, self
        for name, child in self.children():
            yield from child.walk(f"{path}.{name}" if path else name)

    def rewrite(self, rule: Callable[[str, "Node"], "Node | None"], path: str = "") -> "Node":
        """The tree with each node that `rule(path, node)` answers replaced by the answer, from the root down.

        A replacement's own children are visited too, so a rule that wraps a node must not match inside its wrapper.
        """
        node = rule(path, self) or self
        arguments = {
            name: _rewrite(value, rule, f"{path}.{name}" if path else name) for name, value in node.arguments.items()
        }
        return Node(node.component, arguments)


def node(component: Callable[..., nn.Module], **arguments: Any) -> Node:
    """`Node(component, arguments)`, written like the call it stands for."""
    return Node(component, arguments)


def matches(pattern: str, path: str) -> bool:
    """Whether a path fits a pattern, in which `*` stands for one part between dots (or a piece of one)."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]*"), path) is not None


def _build(value: Any) -> Any:
    if isinstance(value, Node):
        return value.build()
    if isinstance(value, tuple):
        return tuple(_build(item) for item in value)
    return value


def _rewrite(value: Any, rule: Callable[[str, Node], Node | None], path: str) -> Any:
    if isinstance(value, Node):
        return value.rewrite(rule, path)
    if isinstance(value, tuple):
        return tuple(_rewrite(item, rule, f"{path}.{i}") for i, item in enumerate(value))
    return value
