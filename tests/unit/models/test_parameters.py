"""Parameters: their names, their initial values, and dropout."""

from typing import Literal

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module

from tests.unit.models.model_sizes import small_model, small_tree

LAYER = [
    "attention.query.weight",
    "attention.key.weight",
    "attention.value.weight",
    "attention.output.weight",
    "attention_norm.weight",
    "feed_forward.gate.weight",
    "feed_forward.up.weight",
    "feed_forward.down.weight",
    "feed_forward_norm.weight",
]
HEAD_NORMS = {"llama3": [], "qwen3": ["attention.query_norm.weight", "attention.key_norm.weight"]}


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_names(family, tied):
    names = [f"layers.{i}.{name}" for i in range(3) for name in LAYER + HEAD_NORMS[family]]
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


def test_initial_spread_is_as_stated():
    torch.manual_seed(0)
    sizes = {"dim": 128, "ffn_dim": 256, "num_layers": 8, "vocab_size": 512, "init_std": 0.05}
    model = small_tree("qwen3", **sizes).build()
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            std = 0.05 / 4 if name.endswith(("attention.output.weight", "down.weight")) else 0.05
            assert weight.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(weight.mean().item()) < 0.1 * std, name


def test_every_owner_of_parameters_can_reset_them():
    owners = [m for m in small_tree("qwen3").build().modules() if list(m.parameters(recurse=False))]
    assert owners
    assert all(callable(getattr(owner, "reset_parameters", None)) for owner in owners)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_reset_can_be_traced_with_weights_swapped_in(tracing_mode):
    with torch.device("meta"):
        model = small_tree("qwen3").build()
    for module in model.modules():
        if own := dict(module.named_parameters(recurse=False)):
            check_traced_reset(module, torch.empty(own["weight"].shape), tracing_mode)


def check_traced_reset(module: nn.Module, weight: torch.Tensor, tracing_mode: Literal["real", "fake"]) -> None:
    def reset(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        with _reparametrize_module(module, {"weight": weight}):
            module.reset_parameters()  # pyright: ignore[reportCallIssue]
        return weight

    graph = make_fx(reset, tracing_mode=tracing_mode)(weight)
    torch.manual_seed(7)
    expected = reset(weight)
    torch.manual_seed(7)
    assert torch.equal(graph(weight), expected)
    assert expected.isfinite().all()
    assert module.weight.is_meta


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
