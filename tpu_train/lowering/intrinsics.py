"""The ops of a captured graph that ATen lacks: a loop with a sub-graph body, random draws that carry their key, and
what passes put in the place of several ATen ops.

Key idea: whatever a captured graph cannot say with a pure ATen op becomes one node with a meaning of its own, defined
here in PyTorch terms (so that the graph still runs in plain PyTorch, which the tests use) and lowered to JAX in
`ops/control_flow.py`, `ops/random.py` and `ops/losses.py`. This file imports torch only.

* `loop` is `jax.lax.scan`: `loop(body, carry, xs, consts) -> (carry, ys)`. Its body is traced once, into a
  sub-GraphModule of the graph, whatever the trip count.
* `random_uniform`, `random_normal` and `random_integers` draw from the run's key folded with their `site`, a 62-bit
  integer in the graph. A recomputed draw is a copy of its node, so it has the same site and draws the same. On a mesh
  `axes` has for each dimension the axes (joined by commas) over which what is drawn is a part of a whole.
* `cross_entropy` keeps a log-sum-exp per row where log_softmax and nll_loss keep a matrix of the logits' size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._higher_order_ops.utils import unique_graph_id
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, disable_proxy_modes_tracing, track_tensor_tree
from torch.utils import _pytree as pytree

from tpu_train.lowering.retrace import Retracer

# body(*carry, *x_slices, *consts) -> [*new_carry, *ys]
LoopBody = Callable[..., Sequence[Tensor]]
LoopResult = tuple[list[Tensor], list[Tensor]]


class Loop(HigherOrderOperator):
    """Runs `body` once per leading index of `xs`, in order (or last to first), carrying tensors along.

    Args of a call:
        body: `body(*carry, *x_slices, *consts) -> [*new_carry, *ys]`; a function, or in a graph a GraphModule.
        carry: tensors whose shapes and dtypes every iteration keeps.
        xs: tensors of one leading length (the trip count, at least one of them), sliced per iteration.
        consts: tensors that every iteration sees whole.
        reverse: run from the last index to the first; `ys` stay in index order.

    Returns:
        The last carry, and each `y` stacked along a new leading dimension.

    It has no derivative: a differentiated loop is a pair of loops whose bodies were traced forward and backward.
    """

    def __init__(self) -> None:
        super().__init__("tpu_train_loop")

    def __call__(
        self,
        body: LoopBody,
        carry: Sequence[Tensor],
        xs: Sequence[Tensor],
        consts: Sequence[Tensor],
        reverse: bool = False,
    ) -> LoopResult:
        """Runs, or traces, the loop."""
        return super().__call__(body, list(carry), list(xs), list(consts), reverse)  # type: ignore[return-value]


loop = Loop()
for _key in (DispatchKey.AutogradCPU, DispatchKey.AutogradMeta, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView):
    loop.fallthrough(_key)


@loop.py_impl(DispatchKey.CompositeExplicitAutograd)
def _run_loop(body: LoopBody, carry: list[Tensor], xs: list[Tensor], consts: list[Tensor], reverse: bool) -> LoopResult:
    """Plain PyTorch meaning of the loop."""
    trips = range(xs[0].shape[0])
    stacked: list[list[Tensor]] = []
    for i in reversed(trips) if reverse else trips:
        out = list(body(*carry, *(x[i] for x in xs), *consts))
        carry, ys = out[: len(carry)], out[len(carry) :]
        stacked.append(ys)
    if reverse:
        stacked.reverse()
    return list(carry), [torch.stack(ys) for ys in zip(*stacked, strict=True)]


def _loop_shapes(
    body: LoopBody, carry: list[Tensor], xs: list[Tensor], consts: list[Tensor], reverse: bool
) -> LoopResult:
    del reverse  # does not change a shape
    out = list(body(*carry, *(x[0] for x in xs), *consts))
    _check_carry(carry, out)
    ys = out[len(carry) :]
    return [torch.empty_like(c) for c in carry], [y.new_empty((xs[0].shape[0], *y.shape)) for y in ys]


def _check_carry(carry: list[Tensor], out: list[Tensor]) -> None:
    for i, (before, after) in enumerate(zip(carry, out, strict=False)):
        assert (before.shape, before.dtype) == (after.shape, after.dtype), (
            f"loop carry {i} enters as {before.dtype}{list(before.shape)}, leaves as {after.dtype}{list(after.shape)}"
        )


@loop.py_impl(FakeTensorMode)
def _fake_loop(
    mode: FakeTensorMode, body: LoopBody, carry: list[Tensor], xs: list[Tensor], consts: list[Tensor], reverse: bool
) -> LoopResult:
    with mode:
        return _loop_shapes(body, carry, xs, consts, reverse)


@loop.py_impl(ProxyTorchDispatchMode)
def _trace_loop(
    mode: ProxyTorchDispatchMode,
    body: LoopBody,
    carry: list[Tensor],
    xs: list[Tensor],
    consts: list[Tensor],
    reverse: bool,
) -> LoopResult:
    with disable_proxy_modes_tracing():
        # Clones: the body's placeholders must not be the outer graph's proxies.
        first = [t.clone() for t in (*carry, *(x[0] for x in xs))]
    graph = _trace_body(body, [*first, *consts])
    _, name = unique_graph_id(mode, "loop_body")
    root = mode.tracer.root
    assert isinstance(root, torch.nn.Module)
    root.register_module(name, graph)
    args = pytree.tree_map(mode.tracer.unwrap_proxy, (graph, carry, xs, consts, reverse))  # type: ignore[arg-type]
    proxy = mode.tracer.create_proxy("call_function", loop, args, {})
    with disable_proxy_modes_tracing():
        result = _loop_shapes(graph, carry, xs, consts, reverse)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


def _trace_body(body: LoopBody, args: list[Tensor]) -> fx.GraphModule:
    """`reenter_make_fx`, except that the body's nodes keep recording source lines, which PyTorch's drops."""
    tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
    assert tracer is not None
    run = Retracer(body).run if isinstance(body, fx.GraphModule) else body
    sub_tracer = tracer._make_sub_tracer()
    with sub_tracer._init_modes_from_parent(tracer):
        outer, inner = tracer.fx_tracer, sub_tracer.fx_tracer
        assert outer is not None
        assert inner is not None
        inner.record_stack_traces = outer.record_stack_traces
        inner._record_forward_stack_traces_only = outer._record_forward_stack_traces_only
        graph = sub_tracer._trace_inner(run, *args)
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, node.target), FakeTensor):
            raise ValueError(f"a loop's body uses {node.target}, a tensor from outside of it; pass it in consts")
    return graph


@loop.py_functionalize_impl
def _functionalize_loop(
    ctx: Any, body: LoopBody, carry: list[Tensor], xs: list[Tensor], consts: list[Tensor], reverse: bool
) -> LoopResult:
    """A loop only reads its arguments, and its body has been made functional before the graph around it."""
    carry, xs, consts = ctx.unwrap_tensors((carry, xs, consts))
    with ctx.redispatch_to_next():
        result = loop(body, carry, xs, consts, reverse)
    return ctx.wrap_tensors(result)


_library = torch.library.Library("tpu_train", "DEF")
_library.define("random_uniform(SymInt[] size, int site, *, ScalarType dtype, str[]? axes=None) -> Tensor")
_library.define("random_normal(SymInt[] size, int site, *, ScalarType dtype, str[]? axes=None) -> Tensor")
_library.define(
    "random_integers(SymInt[] size, int low, int high, int site, *, ScalarType dtype, str[]? axes=None) -> Tensor"
)


def _generator(site: int) -> torch.Generator:
    return torch.Generator().manual_seed(site)


# The plain PyTorch meaning draws other numbers than JAX does; what counts is that one site always draws the same.
@torch.library.impl(_library, "random_uniform", "CompositeExplicitAutograd")
def _uniform(size: list[int], site: int, *, dtype: torch.dtype, axes: Sequence[str] | None = None) -> Tensor:
    assert not axes
    return torch.rand(size, generator=_generator(site), dtype=dtype)


@torch.library.impl(_library, "random_normal", "CompositeExplicitAutograd")
def _normal(size: list[int], site: int, *, dtype: torch.dtype, axes: Sequence[str] | None = None) -> Tensor:
    assert not axes
    return torch.randn(size, generator=_generator(site), dtype=dtype)


@torch.library.impl(_library, "random_integers", "CompositeExplicitAutograd")
def _integers(
    size: list[int], low: int, high: int, site: int, *, dtype: torch.dtype, axes: Sequence[str] | None = None
) -> Tensor:
    assert not axes
    return torch.randint(low, high, size, generator=_generator(site), dtype=dtype)


@torch.library.register_fake("tpu_train::random_uniform", lib=_library)
@torch.library.register_fake("tpu_train::random_normal", lib=_library)
def _fake_draw(size: list[int], site: int, *, dtype: torch.dtype, axes: Sequence[str] | None = None) -> Tensor:
    del site, axes
    return torch.empty(size, dtype=dtype)


@torch.library.register_fake("tpu_train::random_integers", lib=_library)
def _fake_integers(
    size: list[int], low: int, high: int, site: int, *, dtype: torch.dtype, axes: Sequence[str] | None = None
) -> Tensor:
    del low, high, site, axes
    return torch.empty(size, dtype=dtype)


_library.define(
    "cross_entropy(Tensor logits, Tensor target, int reduction, int ignore_index) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor target, Tensor logsumexp, Tensor total_weight, "
    "int reduction, int ignore_index) -> Tensor"
)


@torch.library.impl(_library, "cross_entropy", "CompositeExplicitAutograd")
def _cross_entropy(logits: Tensor, target: Tensor, reduction: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and total weight of log_softmax and nll_loss_forward, and the log-sum-exp of each row, float32 [R]."""
    logprob = torch.log_softmax(logits, 1)
    loss, total_weight = torch.ops.aten.nll_loss_forward(logprob, target, None, reduction, ignore_index)
    return loss, total_weight, torch.logsumexp(logits, 1)


@torch.library.impl(_library, "cross_entropy_backward", "CompositeExplicitAutograd")
def _cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    logsumexp: Tensor,
    total_weight: Tensor,
    reduction: int,
    ignore_index: int,
) -> Tensor:
    """The gradient of the logits [R, V]."""
    logprob = logits - logsumexp[:, None]
    inner = torch.ops.aten.nll_loss_backward(grad, logprob, target, None, reduction, ignore_index, total_weight)
    return torch.ops.aten._log_softmax_backward_data(inner, logprob, 1, logits.dtype)


@torch.library.register_fake("tpu_train::cross_entropy", lib=_library)
def _fake_cross_entropy(
    logits: Tensor, target: Tensor, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    del target, reduction, ignore_index
    return logits.new_empty(()), logits.new_empty(()), logits.new_empty(logits.shape[:1])


@torch.library.register_fake("tpu_train::cross_entropy_backward", lib=_library)
def _fake_cross_entropy_backward(grad: Tensor, logits: Tensor, *rest: Any) -> Tensor:
    del grad, rest
    return torch.empty_like(logits)


cross_entropy = torch.ops.tpu_train.cross_entropy.default
cross_entropy_backward = torch.ops.tpu_train.cross_entropy_backward.default
random_uniform = torch.ops.tpu_train.random_uniform.default
random_normal = torch.ops.tpu_train.random_normal.default
random_integers = torch.ops.tpu_train.random_integers.default
RANDOM_OPS = (random_uniform, random_normal, random_integers)
