"""Makes a captured graph lowerable: functional, and of ops that the table has.

Key idea: both steps trace the graph again, node by node, so that PyTorch's own functionalization and decompositions do
the work; each new node inherits the source line of the node it comes from.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_train.lowering.retrace import Retracer, graph_modules, source_of
from tpu_train.lowering.table import TABLE


class UnsupportedOpsError(ValueError):
    """A graph holds ops that neither the table nor PyTorch's decompositions cover."""


@dataclasses.dataclass(frozen=True)
class MissingOp:
    """An op without an entry, and the innermost model line that led to it ("" when no module's forward did)."""

    op: str
    source: str

    def __str__(self) -> str:
        return (
            f"{self.op}, called from {self.source}"
            if self.source
            else f"{self.op}, called outside any module's forward"
        )


def make_lowerable(graph_module: fx.GraphModule, input_names: Sequence[str] = ()) -> fx.GraphModule:
    """The graph without mutation and without ops the table lacks.

    Args:
        graph_module: as captured.
        input_names: what to call its placeholders in an error.

    Raises:
        UnsupportedOpsError: listing every op that remains unknown with the source lines that called it.
        ValueError: an input is written to in place.
    """
    graph_module = functionalize(graph_module, input_names)
    if _unknown_nodes(graph_module):
        # Composite ops are taken apart by the dispatcher itself while tracing, so they need no place in this dict.
        known_elsewhere = {op: rule for op, rule in core_aten_decompositions().items() if op not in TABLE}
        graph_module = functionalize(_trace_again(graph_module, decompositions=known_elsewhere))
    graph_module.graph.eliminate_dead_code()
    missing = list_missing_ops(graph_module)
    if missing:
        lines = "\n".join(f"  {op}" for op in missing)
        raise UnsupportedOpsError(
            f"{len(missing)} op(s) of the captured graph have no JAX lowering and no PyTorch decomposition:\n{lines}\n"
            "Rewrite these lines with supported ops, or add entries to tpu_train/lowering/ops."
        )
    return graph_module


def functionalize(graph_module: fx.GraphModule, input_names: Sequence[str] = ()) -> fx.GraphModule:
    """The graph with in-place ops replaced by pure ones; graphs without any come back unchanged.

    Raises:
        ValueError: an input is written to in place, itself or through a view.
    """
    for name, child in list(graph_module.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(graph_module, name, functionalize(child))
    if not any(_mutates(node) for node in graph_module.graph.nodes):
        return graph_module
    pure = _trace_again(graph_module, transform=lambda run: torch.func.functionalize(run, remove="mutations"))
    # What PyTorch leaves are copies into the inputs that were written to.
    placeholders = [node for node in pure.graph.nodes if node.op == "placeholder"]
    for node in pure.graph.nodes:
        if _mutates(node):
            index = placeholders.index(node.args[0])
            name = input_names[index] if input_names else f"input {index} of a loop's body"
            raise ValueError(
                f"{name} is written to in place; work on a copy and return the new value instead (a module that keeps "
                "running statistics in its buffers cannot be captured)"
            )
    return pure


def list_missing_ops(graph_module: fx.GraphModule) -> list[MissingOp]:
    """Every op the table lacks, in the graph and its loops' bodies, once per source line."""
    found = {}
    for node in _unknown_nodes(graph_module):
        missing = MissingOp(str(node.target), source_of(node))
        found[missing] = None
    return list(found)


def _unknown_nodes(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [
        node
        for module in graph_modules(graph_module)
        for node in module.graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem and node.target not in TABLE
    ]


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _trace_again(
    graph_module: fx.GraphModule,
    *,
    transform: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    inputs = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    interpreter = Retracer(graph_module)
    with fx_traceback.preserve_node_meta(), torch.no_grad():
        return make_fx(transform(interpreter.run), decomposition_table=decompositions, tracing_mode="fake")(*inputs)
