"""What is done to a captured graph before it is lowered: one list, in order, checked after each pass.

Key idea: a pass replaces nodes by nodes that mean the same, in the graph and in every loop's body. Its name in `PASSES`
and in `mode.passes` is the function's own.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tpu_train.lowering import intrinsics
from tpu_train.lowering.retrace import graph_modules
from tpu_train.sharding.collectives import AFTER, ALL_GATHER
from tpu_train.sharding.simple_fsdp import LABEL

aten = torch.ops.aten

GraphPass = Callable[[fx.Graph], None]


def fuse_cross_entropy_pass(graph: fx.Graph) -> None:
    """log_softmax and nll_loss become `cross_entropy`, which keeps a log-sum-exp per row and no log-probabilities.

    With a large vocabulary the log-probabilities are the largest tensor of a step after the logits, written in the
    forward and read in the backward. Float32 logits [R, V] without class weights; other losses stay as they are.
    """
    for log_softmax in graph.find_nodes(op="call_function", target=aten._log_softmax.default):
        logits, dim, half_to_float = log_softmax.args
        value = logits.meta["val"]
        if half_to_float or value.ndim != 2 or dim not in (1, -1) or value.dtype != torch.float32:
            continue
        losses = [n for n in log_softmax.users if n.target is aten.nll_loss_forward.default]
        if len(losses) == 1 and losses[0].args[2] is None and losses[0].args[3] != 0:
            _fuse_one(graph, log_softmax, losses[0])


def _fuse_one(graph: fx.Graph, log_softmax: fx.Node, loss: fx.Node) -> None:
    logits = log_softmax.args[0]
    _, target, _, reduction, ignore_index = loss.args
    with graph.inserting_before(loss):
        fused = _insert(graph, loss, intrinsics.cross_entropy, (logits, target, reduction, ignore_index))
        parts = [_insert(graph, loss, operator.getitem, (fused, i)) for i in range(3)]
    for getitem in list(loss.users):
        index = getitem.args[1]
        assert isinstance(index, int)
        getitem.replace_all_uses_with(parts[index])
        graph.erase_node(getitem)
    graph.erase_node(loss)
    for inner in [n for n in log_softmax.users if n.target is aten.nll_loss_backward.default]:
        outer = [n for n in inner.users if n.target is aten._log_softmax_backward_data.default]
        for backward in outer:
            arguments = (inner.args[0], logits, target, parts[2], parts[1], reduction, ignore_index)
            with graph.inserting_before(backward):
                new = _insert(graph, backward, intrinsics.cross_entropy_backward, arguments)
            backward.replace_all_uses_with(new)
            graph.erase_node(backward)


def _insert(graph: fx.Graph, old: fx.Node, target: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
    """A call in the place of `old`: with its source line, and the value that PyTorch computes for it."""
    node = graph.call_function(target, arguments)
    node.meta = {k: v for k, v in old.meta.items() if k in ("stack_trace", "seq_nr", "autograd_backward")}
    values = fx.map_arg(arguments, lambda n: n.meta["val"])
    node.meta["val"] = target(*values)
    return node


# What a gathered weight goes through before it is used, and what is repeated with it.
_OF_A_WEIGHT = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.slice.Tensor,
        aten.unsqueeze.default,
        aten.select.int,
        aten.unbind.int,  # stacked experts, one by one
        operator.getitem,
        aten.detach.default,
        aten.alias.default,
        aten._to_copy.default,
        aten.index_select.default,  # the heads of a projection that a device uses
    }
)


def reshard_after_forward_pass(graph: fx.Graph) -> None:
    """A weight that the backward uses is gathered again for it, so that no gathered weight is kept in between.

    The second gather starts when the gradient that meets the weight is there. Once per parameter, whatever the number
    of its uses.
    """
    for node in graph.find_nodes(op="call_function", target=ALL_GATHER):
        if _is_parameter(node) and not _is_backward(node) and not _is_parameter(_origin(node.args[0])):
            _gather_again(graph, node)


def _origin(node: Any) -> Any:
    """What a node is a view of."""
    while isinstance(node, fx.Node) and node.target in _OF_A_WEIGHT:
        node = node.args[0]
    return node


def _is_parameter(node: Any) -> bool:
    """Whether a node gathers a parameter, and not an activation; one laid over two axes is gathered along each."""
    return (
        isinstance(node, fx.Node)
        and node.target is ALL_GATHER
        and node.args[4] == (node.meta.get("custom") or {}).get(LABEL)
    )


def _gather_again(graph: fx.Graph, gather: fx.Node) -> None:
    order = {node: i for i, node in enumerate(graph.nodes)}
    chain = [gather]
    for node in chain:
        chain += [user for user in node.users if user.target in _OF_A_WEIGHT or _is_parameter(user)]
    uses = [(user, node) for node in chain for user in node.users if _is_backward(user) and user not in chain]
    if not uses:
        return
    first = min((user for user, _ in uses), key=order.__getitem__)
    gradient = next(n for n in first.all_input_nodes if n not in chain)
    with graph.inserting_before(first):
        shard = gather.args[0]
        assert isinstance(shard, fx.Node)
        late = _copy(graph, gather, {shard: _insert(graph, gather, AFTER, (shard, gradient))})
        copies = {gather: late}
        for node in chain[1:]:
            copies[node] = _copy(graph, node, copies)
    for user, node in uses:
        user.replace_input_with(node, copies[node])


def _is_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("autograd_backward"))


def _copy(graph: fx.Graph, node: fx.Node, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copy = graph.node_copy(node, lambda n: replaced.get(n, n))
    copy.meta = {**node.meta, "autograd_backward": True}
    return copy


# In the order they run.
PASSES: dict[str, GraphPass] = {
    "fuse_cross_entropy_pass": fuse_cross_entropy_pass,  # before anything that would look at softmax alone
    "reshard_after_forward_pass": reshard_after_forward_pass,  # on a mesh, see parallelism.reshard_after_forward
}


def run_passes(graph_module: fx.GraphModule, names: Sequence[str]) -> None:
    """Runs the named passes, in `PASSES`' order, on the graph and every loop's body; each must leave a sound graph."""
    for name, graph_pass in PASSES.items():
        if name not in names:
            continue
        for module in graph_modules(graph_module):
            before = _contract(module.graph)
            graph_pass(module.graph)
            module.graph.eliminate_dead_code()
            module.graph.lint()
            assert _contract(module.graph) == before, f"{name} changed the inputs or outputs of {module}"
            module.recompile()


def _contract(graph: fx.Graph) -> list[str]:
    """Inputs by name, outputs by shape and dtype."""
    inputs = [node.name for node in graph.nodes if node.op == "placeholder"]
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    return [*inputs, *(f"{n.meta['val'].dtype}{tuple(n.meta['val'].shape)}" for n in outputs if isinstance(n, fx.Node))]
