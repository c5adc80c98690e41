"""A PyTorch function over named tensors as one FX graph of pure ATen ops.

Key idea: make_fx runs the function once on fake tensors, below autograd, so that a backward and an optimizer inside it
are recorded like any other op. Nothing is allocated; the model may live on the meta device.
"""

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx

from tpu_train.graph import random_sites
from tpu_train.graph.collectives import first_difference, name_collectives
from tpu_train.graph.passes import run_passes
from tpu_train.lowering.decompose import UnsupportedOpsError, make_lowerable
from tpu_train.sharding.mesh import ONE_DEVICE, MeshShape, traced_as, traced_mesh

# Nested dicts (and tuples) whose leaves are tensors, arrays or specs.
Tree = Any


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that need not exist."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class CapturedProgram:
    """A captured function.

    Attributes:
        name: for logs and dumps.
        graph: functional, of ops that the table has; one placeholder per input leaf, in `input_names`' order.
        input_names: dotted names of the input leaves (`state.params.norm.weight`).
        output_names: dotted names of the graph's flat outputs.
        outputs: the output structure, with an index into the flat outputs at each leaf.
    """

    name: str
    graph: fx.GraphModule
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    outputs: Tree


def named_leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves with dotted names, dict keys in sorted order, so that equal trees give equal orders."""
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            yield from named_leaves(tree[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from named_leaves(item, f"{prefix}.{i}" if prefix else str(i))
    else:
        yield prefix, tree


def map_leaves(function: Callable[[str, Any], Any], tree: Tree, prefix: str = "") -> Tree:
    """The tree with `function(name, leaf)` at each leaf, called in `named_leaves`' order."""
    if isinstance(tree, Mapping):
        return {k: map_leaves(function, tree[k], f"{prefix}.{k}" if prefix else str(k)) for k in sorted(tree)}
    if isinstance(tree, (tuple, list)):
        return tuple(map_leaves(function, x, f"{prefix}.{i}" if prefix else str(i)) for i, x in enumerate(tree))
    return function(prefix, tree)


def capture(
    name: str,
    function: Callable[..., Tree],
    inputs: Mapping[str, Tree],
    passes: Sequence[str] = (),
    mesh: MeshShape = ONE_DEVICE,
) -> CapturedProgram:
    """Captures `function(**inputs)`, the part of one device of a mesh.

    Args:
        name: the program's name.
        function: takes and returns trees of tensors. It runs without autograd recording; a backward inside enables it.
        inputs: argument name to a tree of `TensorSpec`, of the shapes that one device has.
        passes: names of the graph passes to run, see `graph.passes`.
        mesh: that the program runs on; its collectives are nodes of the graph.

    Raises:
        UnsupportedOpsError: for ops without a lowering, all of them with their source lines.
        ValueError: for Python control flow that depends on a tensor's value, or a graph that is different on another
            device.
    """
    names = [leaf_name for leaf_name, _ in named_leaves(inputs)]
    output: dict[str, Tree] = {}

    def flat(*leaves: Tensor) -> list[Tensor]:
        values = iter(leaves)
        result = function(**map_leaves(lambda _, __: next(values), inputs))
        tensors: list[Tensor] = []

        def number(leaf_name: str, leaf: Tensor) -> int:
            assert isinstance(leaf, Tensor), f"{name} returns {type(leaf).__name__} as {leaf_name}"
            tensors.append(leaf)
            return len(tensors) - 1

        output["tree"] = map_leaves(number, result)
        return tensors

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(spec.shape, dtype=spec.dtype) for _, spec in named_leaves(inputs)]
    graph = _trace_on(mesh, name, flat, fakes)
    try:
        graph = make_lowerable(graph, names)
    except UnsupportedOpsError:
        raise
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    run_passes(graph, passes)
    output_names = tuple(leaf_name for leaf_name, _ in named_leaves(output["tree"]))
    return CapturedProgram(name, graph, tuple(names), output_names, output["tree"])


def _trace_on(mesh: MeshShape, name: str, function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """The trace that every device runs: made as the first, and compared with that of the last."""
    if mesh.size == 1:
        return _trace(name, function, fakes)
    graphs = []
    for rank in (0, mesh.size - 1):
        with traced_as(mesh, rank):
            graph = _trace(name, function, fakes)
            name_collectives(graph, traced_mesh().groups)
            graphs.append(graph)
    if difference := first_difference(*graphs):
        raise ValueError(
            f"{name}: the graph of the first device is not that of the last: {difference}. What depends on a device's "
            "position must come from tpu_train.sharding.collectives.axis_index, not from torch.distributed"
        )
    return graphs[0]


def _trace(name: str, function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    traced = make_fx(
        function,
        decomposition_table=random_sites.DECOMPOSITIONS,
        tracing_mode="fake",
        _allow_non_fake_inputs=True,
        record_stack_traces=True,
    )
    try:
        with torch.no_grad(), random_sites.sites_by_call(), fx_traceback.preserve_node_meta():
            return traced(*fakes)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        line = _model_line(error)
        raise ValueError(
            f"{name}: {'at ' + line if line else 'the function'}, Python or a shape depends on a tensor's value "
            f"({error}), which a captured graph cannot; use torch.where or masking instead"
        ) from error


def _model_line(error: BaseException) -> str:
    """`file:line (code)` of the innermost module `forward` that an exception passed through, or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name == "forward" and "torch" not in f.filename]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


def link_backward_to_source(loss: Tensor) -> None:
    """Lets backward nodes of `loss` be traced to the model lines of their forward nodes; call before the backward."""
    if loss.grad_fn is not None:
        setup_stacktrace_preservation_hooks([loss.grad_fn])
