"""Random ops in captured graphs: keyed by call site or parameter name, repeatable, the same when recomputed."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tpu_train.execution.program import Program
from tpu_train.execution.runtime import Runtime
from tpu_train.graph.capture import TensorSpec, Tree, capture
from tpu_train.graph.initialization import capture_initialization
from tpu_train.lowering.intrinsics import loop, random_uniform

RUNTIME = Runtime("cpu")


def run(function, seed: int = 0, step: int = 0, **inputs: np.ndarray) -> Tree:
    """Captures, compiles and runs `function(**inputs)` with its draws keyed by seed and step."""

    def with_key(seed: Tensor, step: Tensor, **tensors: Tensor) -> Tree:
        del seed, step
        return function(**tensors)

    program = Program("test", lambda specs: capture("test", with_key, specs), key_inputs=("seed", "step"))
    keys = {"seed": np.int32(seed), "step": np.int32(step)}
    return RUNTIME.fetch(program(**RUNTIME.put({**inputs, **keys})))


def test_dropout_keeps_the_expected_share_and_scales_it() -> None:
    x = np.ones((200, 500), np.float32)
    out = run(lambda x: {"y": F.dropout(x, 0.3)}, x=x)["y"]
    kept = out != 0
    assert kept.mean() == pytest.approx(0.7, abs=0.01)  # 100,000 draws: standard deviation 0.0014
    np.testing.assert_allclose(out[kept], 1 / 0.7, rtol=1e-6)


def test_draws_differ_by_seed_step_and_call_site_and_repeat_otherwise() -> None:
    def two(x: Tensor) -> Tree:
        return {"a": torch.rand_like(x), "b": torch.rand_like(x)}

    x = np.zeros(64, np.float32)
    first, again = run(two, x=x), run(two, x=x)
    np.testing.assert_array_equal(first["a"], again["a"])
    others = [first["b"], run(two, seed=1, x=x)["a"], run(two, step=1, x=x)["a"]]
    assert all((other != first["a"]).all() for other in others)


def test_every_loop_iteration_draws_anew() -> None:
    def draw_in_loop(x: Tensor) -> Tree:
        _, (ys,) = loop(lambda carry, row: [carry, torch.rand_like(row)], [torch.zeros(())], [x], [])
        return {"y": ys}

    out = run(draw_in_loop, x=np.zeros((5, 64), np.float32))["y"]
    assert len(np.unique(out)) > 0.99 * out.size


def test_checkpointed_dropout_recomputes_the_same_mask() -> None:
    def gradient(x: Tensor) -> Tree:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = checkpoint(lambda t: F.dropout(t.sin(), 0.5), x, use_reentrant=False)
            (grad,) = torch.autograd.grad(y.sum(), x)
        return {"y": y.detach(), "grad": grad}

    x = np.linspace(0.1, 1.4, 1000, dtype=np.float32)
    out = run(gradient, x=x)
    # d/dx sin(x) * mask * 2 = cos(x) * mask * 2, with the very mask of the forward.
    np.testing.assert_allclose(out["grad"], np.where(out["y"] != 0, 2 * np.cos(x), 0), rtol=1e-5)


def test_a_checkpointed_draw_is_two_nodes_with_one_site() -> None:
    def gradient(x: Tensor) -> Tree:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = checkpoint(lambda t: F.dropout(t, 0.5).sin(), x, use_reentrant=False)
            (grad,) = torch.autograd.grad(y.sum(), x)
        return {"grad": grad}

    captured = capture("test", gradient, {"x": TensorSpec((8,), torch.float32)})
    sites = [node.args[1] for node in captured.graph.graph.nodes if node.target is random_uniform]
    assert len(sites) == 2
    assert len(set(sites)) == 1


@pytest.mark.parametrize(
    ("draw", "mean", "std"),
    [
        (torch.randn_like, 0.0, 1.0),
        (lambda x: torch.empty_like(x).normal_(3.0, 2.0), 3.0, 2.0),
        (lambda x: torch.empty_like(x).uniform_(-1.0, 3.0), 1.0, 4 / 12**0.5),
        (lambda x: torch.empty_like(x).exponential_(2.0), 0.5, 0.5),
        (lambda x: torch.bernoulli(torch.full_like(x, 0.25)), 0.25, 0.1875**0.5),
        (lambda x: torch.randint(0, 10, x.shape).float(), 4.5, (99 / 12) ** 0.5),
        (lambda x: torch.randint_like(x, 10), 4.5, (99 / 12) ** 0.5),
        (lambda x: torch.randperm(x.shape[0]).float(), 49999.5, (100_000**2 / 12) ** 0.5),
    ],
    ids=["randn", "normal_", "uniform_", "exponential_", "bernoulli", "randint", "randint_like", "randperm"],
)
def test_distributions_have_their_mean_and_spread(draw, mean: float, std: float) -> None:
    out = run(lambda x: {"y": draw(x)}, x=np.zeros(100_000, np.float32))["y"]
    assert out.mean() == pytest.approx(mean, abs=0.02 * std)  # standard error: 0.003 std
    assert out.std() == pytest.approx(std, rel=0.02)


def initialize(model: nn.Module, seed: int = 0) -> dict[str, np.ndarray]:
    program = Program("init", lambda _: capture_initialization(model, torch.float32), key_inputs=("seed",))
    # The program takes nothing but the seed, which only its key sees.
    return RUNTIME.fetch(program(seed=RUNTIME.put(np.int32(seed))))


def test_a_parameters_initial_value_depends_on_its_name_alone() -> None:
    small = initialize(nn.ModuleDict({"b": nn.Linear(8, 4)}))
    large = initialize(nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(8, 4), "c": nn.Embedding(5, 3)}))
    np.testing.assert_array_equal(small["b.weight"], large["b.weight"])
    np.testing.assert_array_equal(small["b.bias"], large["b.bias"])


def test_initialization_follows_torchs_distribution_and_the_seed() -> None:
    weight = initialize(nn.Linear(256, 512))["weight"]
    bound = 1 / 256**0.5  # nn.Linear: uniform within 1/sqrt(in_features)
    assert np.abs(weight).max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.01)
    assert (weight != initialize(nn.Linear(256, 512), seed=1)["weight"]).mean() > 0.999


def test_a_parameter_nobody_fills_is_refused_by_name() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    with pytest.raises(ValueError, match=r"no reset_parameters\(\) fills inner\.scale"):
        capture_initialization(nn.ModuleDict({"inner": Bare()}), torch.float32)


def test_an_initializer_that_draws_outside_its_parameters_is_refused() -> None:
    class Wrong(nn.Linear):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                self.weight.copy_(torch.randn(self.weight.shape))

    with pytest.raises(ValueError, match="draws random numbers outside a parameter"):
        capture_initialization(Wrong(2, 2), torch.float32)
