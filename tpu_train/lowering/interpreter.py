"""An FX graph of ATen ops as one JAX function.

Key idea: the graph is interpreted once, while JAX traces; each node calls its entry of the table. Loop bodies are
GraphModules among a node's arguments and reach their entry as JAX functions made by the same interpreter.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch
from jax import Array
from torch import fx
from torch.utils import _pytree as pytree

from tpu_train.lowering import table
from tpu_train.lowering.dtypes import jax_dtype
from tpu_train.lowering.intrinsics import RANDOM_OPS
from tpu_train.lowering.retrace import graph_modules, source_of

JaxFunction = Callable[..., Any]

# Placement and memory hints of PyTorch that mean nothing to an XLA program.
_IGNORED_KWARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "requires_grad"})


def needs_64_bit(graph_module: fx.GraphModule) -> bool:
    """Whether the graph computes something that 32 bits cannot hold: a float64 tensor, or a large integer constant.

    PyTorch's default integer is int64, nearly always for indices and counts that 32 bits hold; those lower to int32.
    """
    return any(_is_wide(module, node) for module in graph_modules(graph_module) for node in module.graph.nodes)


def _is_wide(module: fx.GraphModule, node: fx.Node) -> bool:
    value = operator.attrgetter(str(node.target))(module) if node.op == "get_attr" else node.meta.get("val")
    if node.op == "get_attr" and isinstance(value, torch.Tensor) and not value.is_floating_point() and value.numel():
        return not -(2**31) <= int(value.min()) <= int(value.max()) < 2**31
    if isinstance(value, torch.Tensor) and value.dtype == torch.float64:
        return True
    # Here a large integer means "to the end", or is the site of a draw, its last argument.
    if node.target in (torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default):
        return False
    arguments = node.args[:-1] if node.target in RANDOM_OPS else node.args
    return any(isinstance(x, int) and not -(2**31) <= x < 2**31 for x in pytree.tree_leaves((arguments, node.kwargs)))


def to_jax(graph_module: fx.GraphModule, *, check: bool = False) -> JaxFunction:
    """The graph as a function of JAX arrays, one per placeholder, returning the graph's output structure.

    Args:
        graph_module: a functional graph whose every op is in the table (see `decompose`).
        check: compare the shape and dtype of each node's result with what PyTorch's trace recorded.
    """

    def function(*args: Array) -> Any:
        values: dict[fx.Node, Any] = {}
        placeholders = iter(args)
        for node in graph_module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(placeholders)
            elif node.op == "get_attr":
                values[node] = _attribute(graph_module, node.target, check)
            elif node.op == "call_function":
                values[node] = _call(node, values)
                if check:
                    _check_value(node, values[node])
            elif node.op == "output":
                return _resolve(node.args[0], values)
            else:
                raise AssertionError(f"{node.op} {node.target}: a captured graph has calls of functions only")
        raise AssertionError("a graph without an output")

    return function


def _call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    entry = operator.getitem if node.target is operator.getitem else table.TABLE[node.target]
    args = _resolve(node.args, values)
    kwargs = {k: _resolve(v, values) for k, v in node.kwargs.items() if k not in _IGNORED_KWARGS}
    try:
        return entry(*args, **kwargs)
    except ValueError as error:
        source = source_of(node)
        if not source or source in str(error):  # an inner call, in a loop's body, has named it
            raise
        raise ValueError(f"{error}, called from {source}") from error


def _resolve(argument: Any, values: Mapping[fx.Node, Any]) -> Any:
    """A node argument with nodes replaced by their values and dtypes by JAX's; lists stay lists, tuples tuples."""
    if isinstance(argument, fx.Node):
        return values[argument]
    if isinstance(argument, torch.dtype):
        return jax_dtype(argument)
    if isinstance(argument, Mapping):
        return {k: _resolve(v, values) for k, v in argument.items()}
    if isinstance(argument, Sequence) and not isinstance(argument, str):
        items = [_resolve(item, values) for item in argument]
        return tuple(items) if isinstance(argument, tuple) else items
    return argument


def _attribute(graph_module: fx.GraphModule, target: str, check: bool) -> Array | JaxFunction:
    """A loop body as a JAX function, or a tensor constant as an array."""
    value = operator.attrgetter(target)(graph_module)
    if isinstance(value, fx.GraphModule):
        return to_jax(value, check=check)
    assert isinstance(value, torch.Tensor)
    return constant(value)


def constant(tensor: torch.Tensor) -> Array:
    """A tensor's values as a JAX array."""
    dtype = jax_dtype(tensor.dtype)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    return jnp.asarray(tensor.detach().numpy(), dtype)


def _check_value(node: fx.Node, value: Any) -> None:
    expected = node.meta.get("val")
    if isinstance(expected, torch.Tensor):
        assert tuple(value.shape) == tuple(expected.shape), f"{node}: {value.shape} for {expected.shape}"
        assert value.dtype == jax_dtype(expected.dtype), f"{node}: {value.dtype} for {expected.dtype}"
