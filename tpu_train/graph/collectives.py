"""DTensor's collectives as the project's own, and the check that a trace does not depend on the device it was made as.

Key idea: after capture there is one vocabulary of collectives, named by axis and owner. DTensor's process groups get
the names of their axes, its waits go (XLA schedules), and its detour over dimension 0 (gather, split, concatenate) is
one gather along the right dimension.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from tpu_train.lowering.retrace import graph_modules, source_of
from tpu_train.sharding.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from tpu_train.sharding.simple_fsdp import LABEL

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

# Axis and size behind the name of each of PyTorch's process groups.
Groups = Mapping[str, tuple[str, int]]


def name_collectives(graph_module: fx.GraphModule, groups: Groups) -> None:
    """Replaces `_c10d_functional` nodes, in the graph and in every loop's body.

    Raises:
        ValueError: a collective that has no counterpart here.
    """
    for module in graph_modules(graph_module):
        labels = _labels(module.graph)
        for node in list(module.graph.nodes):
            if node.op == "call_function" and getattr(node.target, "namespace", "") == "_c10d_functional":
                _replace(node, groups, labels)
        module.graph.eliminate_dead_code()
        module.recompile()


def _labels(graph: fx.Graph) -> dict[Any, str]:
    """Owner of what autograd recorded under each sequence number; a backward node has its forward's number."""
    return {
        node.meta.get("seq_nr"): node.meta["custom"][LABEL]
        for node in graph.nodes
        if LABEL in (node.meta.get("custom") or {}) and not node.meta.get("autograd_backward")
    }


def _replace(node: fx.Node, groups: Groups, labels: Mapping[Any, str]) -> None:
    if node.target is _c10d.wait_tensor.default:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        node.graph.erase_node(node)
        return
    known: dict[Any, Callable[..., fx.Node]] = {
        _c10d.all_gather_into_tensor.default: _gather,
        _c10d.reduce_scatter_tensor.default: _scatter,
        _c10d.all_reduce.default: _reduce,
    }
    if node.target not in known:
        raise ValueError(f"{node.target} (called from {source_of(node)}) has no lowering; allowed are {list(known)}")
    known[node.target](node, groups, labels.get(node.meta.get("seq_nr"), ""))


def _insert(old: fx.Node, target: Any, args: tuple[Any, ...], value: torch.Tensor) -> fx.Node:
    with old.graph.inserting_before(old):
        new = old.graph.call_function(target, args)
    new.meta = {**old.meta, "val": value}
    return new


def _gather(node: fx.Node, groups: Groups, label: str) -> fx.Node:
    x, size, group = node.args
    joined, dim = node, 0
    (wait,) = node.users
    (split,) = wait.users if len(wait.users) == 1 else (None,)
    if split is not None and split.target is aten.split.Tensor:
        cats = {user for part in split.users for user in part.users}
        (cat,) = cats if len(cats) == 1 else (None,)
        if cat is not None and cat.target is aten.cat.default:
            joined, dim = cat, cat.args[1] if len(cat.args) > 1 else 0
    new = _insert(node, ALL_GATHER, (x, [groups[str(group)][0]], size, dim, label), joined.meta["val"])
    joined.replace_all_uses_with(new)
    return new


def _scatter(node: fx.Node, groups: Groups, label: str) -> fx.Node:
    x, op, size, group = node.args
    assert op == "sum", f"{node} reduces by {op}: parts of a batch are summed"
    dim = 0
    assert isinstance(x, fx.Node)
    if x.target is aten.cat.default and not (len(x.args) > 1 and x.args[1]):
        splits = {part.args[0] for part in x.args[0] if part.target is operator.getitem}  # type: ignore[union-attr]
        (split,) = splits if len(splits) == 1 else (None,)
        if isinstance(split, fx.Node) and split.target is aten.split.Tensor:
            x, dim = split.args[0], split.args[2] if len(split.args) > 2 else 0
    new = _insert(node, REDUCE_SCATTER, (x, [groups[str(group)][0]], size, dim, label), node.meta["val"])
    node.replace_all_uses_with(new)
    return new


def _reduce(node: fx.Node, groups: Groups, label: str) -> fx.Node:
    x, op, group = node.args
    assert op in ("sum", "max"), f"{node} reduces by {op}"
    axis, size = groups[str(group)]
    new = _insert(node, ALL_REDUCE, (x, [axis], size, op, label), node.meta["val"])
    node.replace_all_uses_with(new)
    return new


def first_difference(first: fx.GraphModule, second: fx.GraphModule) -> str:
    """The first node in which two graphs differ, with its source line; "" where they are equal."""
    for one, other in zip(graph_modules(first), graph_modules(second), strict=False):
        for a, b in zip(one.graph.nodes, other.graph.nodes, strict=False):
            if a.format_node() != b.format_node() or not _same_constant(one, a, other, b):
                return f"{a.format_node()} against {b.format_node()}, called from {source_of(a) or 'no module'}"
        if len(one.graph.nodes) != len(other.graph.nodes):
            return f"{len(one.graph.nodes)} nodes against {len(other.graph.nodes)}"
    return ""


def _same_constant(one: fx.GraphModule, a: fx.Node, other: fx.GraphModule, b: fx.Node) -> bool:
    if a.op != "get_attr":
        return True
    left, right = (operator.attrgetter(str(node.target))(module) for module, node in ((one, a), (other, b)))
    return not isinstance(left, torch.Tensor) or torch.equal(left, right)
