"""Walking a captured graph: through its loops' bodies, and node by node to trace it again."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx


def graph_modules(graph_module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graph and, recursively, the bodies of its loops: what every pass and check visits."""
    yield graph_module
    for child in graph_module.children():
        if isinstance(child, fx.GraphModule):
            yield from graph_modules(child)


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


class Retracer(fx.Interpreter):
    """An interpreter for which strides mean nothing, as they do in XLA.

    A decomposition may give a result of other strides than the op it replaces, and a `view` recorded for the old
    strides would then fail; reshape makes it a copy where it must be one.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs one node."""
        if target is torch.ops.aten.view.default:
            return torch.reshape(*args, **kwargs)
        return super().call_function(target, args, kwargs)
