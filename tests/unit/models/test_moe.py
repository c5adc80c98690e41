"""The mixture of experts against a loop over tokens, and its routing: ties, counts, groups, load-balancing loss."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.unit.models.model_sizes import small_model
from tpu_train.models.moe import (
    Experts,
    GroupedProduct,
    MoeFeedForward,
    Router,
    collect_routing,
    load_balancing_loss,
    permute,
    unpermute,
)

DIM, FFN_DIM, NUM_EXPERTS = 6, 5, 4


def make_layer(top_k: int = 2, norm_topk_prob: bool = True, dtype: torch.dtype = torch.float64) -> MoeFeedForward:
    torch.manual_seed(0)
    router = Router(DIM, NUM_EXPERTS, top_k, norm_topk_prob, init_std=1.0)
    experts = Experts(NUM_EXPERTS, DIM, FFN_DIM, init_std=0.5, down_init_std=0.5)
    return MoeFeedForward(router, experts, GroupedProduct()).to(dtype)


def token_by_token(layer: MoeFeedForward, x: Tensor) -> Tensor:
    """The layer as its definition reads, one token after the other."""
    experts, router = layer.experts, layer.router
    assert isinstance(experts, Experts)
    assert isinstance(router, Router)
    outputs = []
    for token in x.flatten(0, 1):
        probabilities = torch.softmax(router.weight @ token, 0)
        chosen = sorted(range(NUM_EXPERTS), key=lambda e: (-probabilities[e].item(), e))[: router.top_k]
        total = sum(probabilities[e] for e in chosen) if router.norm_topk_prob else 1.0
        output = torch.zeros_like(token)
        for e in chosen:
            hidden = F.silu(experts.gate[e] @ token) * (experts.up[e] @ token)
            output = output + probabilities[e] / total * (experts.down[e] @ hidden)
        outputs.append(output)
    return torch.stack(outputs).view_as(x)


def inputs(case: str) -> Tensor:
    """Rows [B, S, D]: random ones, or ones that all choose the same experts."""
    x = torch.randn(2, 9, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x if case == "any" else x[:1, :1] + 0.01 * x


@pytest.mark.parametrize("case", ["any", "same"])
@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_outputs_and_gradients_equal_a_loop_over_tokens(top_k: int, norm_topk_prob: bool, case: str) -> None:
    layer = make_layer(top_k, norm_topk_prob)
    x = inputs(case).requires_grad_()
    with collect_routing() as routing:
        actual = layer(x)
    (counts,) = (found.counts for found in routing)
    assert counts.sum() == 18 * top_k
    assert ((counts == 0).any() and (counts == 18).any()) == (case == "same" and top_k < 4)
    expected = token_by_token(layer, x)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    leaves = [x, *layer.parameters()]
    upstream = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(actual, leaves, upstream)
    for leaf, ours, theirs in zip(leaves, found, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=str(leaf.shape))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_bfloat16_outputs_are_those_of_a_loop_over_tokens_rounded(norm_topk_prob: bool) -> None:
    layer, x = make_layer(norm_topk_prob=norm_topk_prob).bfloat16(), inputs("any").bfloat16()
    actual = layer(x).double()
    torch.testing.assert_close(actual, token_by_token(layer.double(), x.double()), rtol=1.6e-2, atol=1.6e-2)


def test_an_expert_without_rows_has_no_gradient_and_no_nan() -> None:
    layer = make_layer(top_k=1)
    with collect_routing() as routing:
        layer(inputs("same")).square().sum().backward()
    idle = (routing[0].counts == 0).nonzero().flatten()
    assert len(idle) == NUM_EXPERTS - 1
    for weight in layer.experts.parameters():
        assert weight.grad is not None
        assert not weight.grad[idle].any()
        assert weight.grad.isfinite().all()
        assert weight.grad.any()


@pytest.mark.parametrize("sizes", [[3, 0, 2, 4], [0, 0, 0, 9], [9, 0, 0, 0], [0, 2, 0, 3], [0, 0, 0, 0]])
def test_grouped_product_equals_a_product_per_group(sizes: list[int]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, DIM), torch.randn(4, FFN_DIM, DIM)
    out = GroupedProduct()(x, weight, torch.tensor(sizes, dtype=torch.int32))
    start = 0
    for matrix, size in zip(weight, sizes, strict=True):
        torch.testing.assert_close(out[start : start + size], x[start : start + size] @ matrix.T)
        start += size
    assert not out[start:].any()


def test_equally_probable_experts_are_chosen_by_index() -> None:
    router = make_layer(top_k=2).router
    assert isinstance(router, Router)
    x = torch.randn(500, DIM, dtype=torch.float64)
    with torch.no_grad():
        router.weight.zero_()
        assert (router(x).experts == torch.tensor([0, 1])).all()
        router.weight[3] = router.weight[1] = torch.randn(DIM, dtype=torch.float64)
        chosen = router(x).experts
    likely = x @ router.weight[1] > 0
    assert (chosen[likely] == torch.tensor([1, 3])).all()
    assert (chosen[~likely] == torch.tensor([0, 2])).all()
    assert likely.any()
    assert not likely.all()


def test_rows_of_an_expert_keep_their_order() -> None:
    """So that equal inputs give equal bits, whatever the sort."""
    experts = torch.tensor([[2, 0], [0, 2], [2, 1]])
    permutation = experts.flatten().sort(stable=True).indices
    inverse = permutation.sort().indices
    x = torch.arange(3.0)[:, None]
    grouped = permute(x, permutation, inverse, 2)
    assert grouped.flatten().tolist() == [0, 1, 2, 0, 1, 2]
    assert unpermute(grouped, permutation, inverse).flatten().tolist() == [0, 0, 1, 1, 2, 2]


def test_permutations_have_the_derivatives_of_what_they_compute() -> None:
    permutation = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    inverse = permutation.sort().indices
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, permutation, inverse, 2), x)
    assert torch.autograd.gradcheck(lambda y: unpermute(y, permutation, inverse), y)


def test_neither_forward_nor_backward_scatters() -> None:
    layer = make_layer(dtype=torch.float32)

    def step(x: Tensor, *weights: Tensor) -> Any:
        named = dict(zip([name for name, _ in layer.named_parameters()], weights, strict=True))
        leaves = [x, *weights]
        out = torch.func.functional_call(layer, named, (x,))
        return torch.autograd.grad(out.square().sum(), leaves)

    leaves = [inputs("any").float().requires_grad_(), *layer.parameters()]
    graph = make_fx(step, tracing_mode="fake")(*leaves).graph
    ops = {str(node.target) for node in graph.nodes if node.op == "call_function"}
    assert not [op for op in ops if any(word in op for word in ("scatter", "index_add", "put", "bincount", "nonzero"))]
    assert "aten.index_select.default" in ops


@pytest.mark.parametrize("bfloat16", [False, True])
def test_router_computes_in_float32(bfloat16: bool) -> None:
    layer = make_layer(dtype=torch.bfloat16 if bfloat16 else torch.float32)
    x = inputs("any").to(layer.router.get_parameter("weight").dtype)
    chosen = layer.router(x.flatten(0, 1))
    expected = F.linear(x.flatten(0, 1).float(), layer.router.get_parameter("weight").float()).softmax(-1)
    assert torch.equal(chosen.probabilities, expected)
    assert chosen.weights.dtype == torch.float32
    assert chosen.counts.dtype == torch.int32
    assert layer(x).dtype == x.dtype


def routing_and_logits(model: Any, tokens: Tensor) -> tuple[list[Any], Any]:
    """What was collected, and the routers' logits per layer."""
    seen: list[Tensor] = []
    hooks = [
        layer.feed_forward.router.register_forward_pre_hook(lambda r, args: seen.append(F.linear(args[0], r.weight)))
        for layer in model.layers
    ]
    with collect_routing() as routing:
        model(tokens, torch.arange(tokens.shape[1]).expand(tokens.shape))
    for hook in hooks:
        hook.remove()
    return routing, tuple(seen)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_load_balancing_loss_and_its_gradient_equal_transformers(top_k: int) -> None:
    model = small_model("qwen3_moe", top_k=top_k)
    tokens = torch.randint(97, (2, 16), generator=torch.Generator().manual_seed(1))
    routing, logits = routing_and_logits(model, tokens)
    assert len(routing) == 3
    assert all(found.counts.sum() == 32 * top_k for found in routing)
    actual, expected = load_balancing_loss(routing), load_balancing_loss_func(logits, 5, top_k)
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)
    routers = [weight for name, weight in model.named_parameters() if name.endswith("router.weight")]
    assert len(routers) == 3
    for ours, theirs in zip(
        torch.autograd.grad(actual, routers, retain_graph=True), torch.autograd.grad(expected, routers), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_balanced_router_has_a_loss_of_top_k() -> None:
    layer = make_layer(top_k=2, dtype=torch.float32)
    x = torch.eye(DIM)[: NUM_EXPERTS - 2].repeat(4, 1)[None]
    with torch.no_grad():
        layer.router.get_parameter("weight").zero_()[:2, 0] = 50.0
        layer.router.get_parameter("weight")[2:, 1] = 50.0
    with collect_routing() as routing:
        layer(x)
    assert routing[0].counts.tolist() == [4, 4, 4, 4]
    assert load_balancing_loss(routing).item() == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("collecting", [True, False])
def test_remat_counts_once_and_gives_the_same_gradients(collecting: bool) -> None:
    layer = make_layer()
    x = inputs("any").requires_grad_()
    results = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        with collect_routing() as routing:
            out = run(x)
        loss = out.square().sum() + (load_balancing_loss(routing) if collecting else 0)
        results.append(torch.autograd.grad(loss, [x, *layer.parameters()]))
        assert len(routing) == 1
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_nothing_is_kept_outside_a_collector_and_inner_ones_are_apart() -> None:
    layer, x = make_layer(), inputs("any")
    layer(x)
    with collect_routing() as outer:
        with collect_routing() as inner:
            layer(x)
        layer(x)
        layer(x)
    layer(x)
    assert (len(outer), len(inner)) == (2, 1)


def test_decoding_with_a_cache_equals_the_whole_sequence() -> None:
    model = small_model("qwen3_moe")
    tokens, positions = torch.randint(97, (2, 12)), torch.arange(12).expand(2, 12)
    whole, cache = model(tokens, positions), model.empty_cache(2, 12)
    parts = [model(tokens[:, i : i + 4], positions[:, i : i + 4], cache=cache) for i in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-5, atol=1e-5)
