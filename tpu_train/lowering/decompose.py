"""Makes a captured graph lowerable: functional, and of ops that the table has.

Key idea: both steps trace the graph again, node by node, so that PyTorch's own functionalization and decompositions do
the work; each new node inherits the source line of the node it comes from.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_train.lowering.retrace import Retracer, graph_modules
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


def make_lowerable(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph without mutation and without ops the table lacks.

    Raises:
        UnsupportedOpsError: listing every op that remains unknown with the source lines that called it.
    """
    graph_module = functionalize(graph_module)
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


def functionalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph with in-place ops replaced by pure ones; graphs without any come back unchanged."""
    for name, child in list(graph_module.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(graph_module, name, functionalize(child))
    if not any(_mutates(node) for node in graph_module.graph.nodes):
        return graph_module
    return _trace_again(graph_module, transform=lambda run: torch.func.functionalize(run, remove="mutations"))


def list_missing_ops(graph_module: fx.GraphModule) -> list[MissingOp]:
    """Every op the table lacks, in the graph and its loops' bodies, once per source line."""
    found = {}
    for node in _unknown_nodes(graph_module):
        missing = MissingOp(str(node.target), source_of(node))
        found[missing] = None
    return list(found)


def source_of(node: fx.Node) -> str:
    """`file:line (code)` of the innermost module `forward` that made the node; for a backward node, its forward's."""
    trace = node.meta.get("stack_trace") or ""
    if not trace and node.meta.get("autograd_backward"):
        for other in node.graph.nodes:
            same_op = other.meta.get("seq_nr") == node.meta.get("seq_nr") and not other.meta.get("autograd_backward")
            if same_op and other.meta.get("stack_trace"):
                trace = other.meta["stack_trace"]
                break
    lines = [line.strip() for line in trace.strip().splitlines()]
    if not lines:
        return ""
    last = max(i for i, line in enumerate(lines) if line.startswith("File "))
    file, line, *_ = lines[last].split(", ")
    code = lines[last + 1] if last + 1 < len(lines) else ""
    return f"{file.removeprefix('File ').strip(chr(34))}:{line.removeprefix('line ')} ({code})"


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
