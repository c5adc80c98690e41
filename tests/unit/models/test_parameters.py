"""Parameters: their names, their initial values, and dropout."""

from typing import Literal

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module

from tests.unit.models.model_sizes import small_model, small_tree

ATTENTION = [
    "attention.query.weight",
    "attention.key.weight",
    "attention.value.weight",
    "attention.output.weight",
    "attention_norm.weight",
    "feed_forward_norm.weight",
]
FEED_FORWARD = ["feed_forward.gate.weight", "feed_forward.up.weight", "feed_forward.down.weight"]
HEAD_NORMS = ["attention.query_norm.weight", "attention.key_norm.weight"]
LAYER = {
    "llama3": [*ATTENTION, *FEED_FORWARD],
    "qwen3": [*ATTENTION, *FEED_FORWARD, *HEAD_NORMS],
    "qwen3_moe": [
        *ATTENTION,
        *HEAD_NORMS,
        "feed_forward.router.weight",
        "feed_forward.experts.gate",
        "feed_forward.experts.up",
        "feed_forward.experts.down",
    ],
}


@pytest.mark.parametrize("family", list(LAYER))
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_names(family, tied):
    names = [f"layers.{i}.{name}" for i in range(3) for name in LAYER[family]]
    names += ["embedding.weight", "norm.weight"] + ([] if tied else ["output.weight"])
    model = small_tree(family, tie_embeddings=tied).build()
    assert sorted(dict(model.named_parameters(remove_duplicate=False))) == sorted(names)
    assert sorted(model.state_dict()) == sorted(names)


def test_tied_embedding_gets_the_gradient_of_both_uses():
    tied, untied = small_model(tie_embeddings=True), small_model()
    untied.load_state_dict({**tied.state_dict(), "output.weight": tied.embedding.weight})
    tokens, positions = torch.arange(10)[None], torch.arange(10)[None]
    for model in (tied, untied):
        model(tokens, positions).square().mean().backward()
    lookup, projection = untied.get_parameter("embedding.weight").grad, untied.get_parameter("output.weight").grad
    assert lookup is not None
    assert projection is not None
    both = tied.get_parameter("embedding.weight").grad
    torch.testing.assert_close(both, lookup + projection, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_initial_spread_is_as_stated(family):
    torch.manual_seed(0)
    sizes = {"dim": 128, "ffn_dim": 256, "num_layers": 8, "vocab_size": 512, "init_std": 0.05}
    model = small_tree(family, **sizes).build()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            std = 0.05 / 4 if name.endswith(("attention.output.weight", "down.weight", "experts.down")) else 0.05
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(weight.mean().item()) < 0.1 * std, name


@pytest.mark.parametrize("family", list(LAYER))
def test_every_owner_of_parameters_can_reset_them(family):
    owners = [m for m in small_tree(family).build().modules() if list(m.parameters(recurse=False))]
    assert owners
    assert all(callable(getattr(owner, "reset_parameters", None)) for owner in owners)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_reset_can_be_traced_with_weights_swapped_in(family, tracing_mode):
    with torch.device("meta"):
        model = small_tree(family).build()
    for module in model.modules():
        if own := dict(module.named_parameters(recurse=False)):
            check_traced_reset(module, {name: torch.empty(w.shape) for name, w in own.items()}, tracing_mode)


def check_traced_reset(
    module: nn.Module, weights: dict[str, torch.Tensor], tracing_mode: Literal["real", "fake"]
) -> None:
    def reset(*values: torch.Tensor) -> list[torch.Tensor]:
        blank = {name: value.clone() for name, value in zip(weights, values, strict=True)}
        with _reparametrize_module(module, blank):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
        return list(blank.values())

    graph = make_fx(reset, tracing_mode=tracing_mode)(*weights.values())
    torch.manual_seed(7)
    expected = reset(*weights.values())
    torch.manual_seed(7)
    for found, value in zip(graph(*weights.values()), expected, strict=True):
        assert torch.equal(found, value)
        assert value.isfinite().all()
    assert all(weight.is_meta for weight in module.parameters())


def test_dropout_acts_in_training_only():
    model, plain = small_model(dropout=0.5), small_model()
    tokens, positions = torch.arange(10)[None], torch.arange(10)[None]
    assert torch.equal(model(tokens, positions), plain(tokens, positions))
    model.train()
    assert not torch.equal(model(tokens, positions), model(tokens, positions))


def test_dropout_of_everything_leaves_the_embedding():
    model = small_model(dropout=1.0).train()
    tokens = torch.arange(10)[None]
    assert model.output is not None
    expected = model.output(model.norm(model.embedding(tokens)))
    assert torch.equal(model(tokens, torch.arange(10)[None]), expected)


def test_no_dropout_leaves_no_dropout_module():
    assert not [m for m in small_tree().build().modules() if isinstance(m, nn.Dropout)]
