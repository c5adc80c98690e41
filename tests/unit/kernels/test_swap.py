"""Swaps: components replaced by type and path, in a config tree and in a foreign module; and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.runs import LLAMA3, QWEN3_MOE, make_run, random_batches
from tpu_train.checking import compose_checked
from tpu_train.config.problems import ConfigError
from tpu_train.execution.runtime import Runtime
from tpu_train.kernels.build import model_tree
from tpu_train.kernels.swap import Swap, load, replace_modules, rewrite
from tpu_train.models.attention import ScaledDotProductAttention
from tpu_train.models.feed_forward import FeedForward
from tpu_train.models.norm import RMSNorm
from tpu_train.training.engine import Engine


class Halved(ScaledDotProductAttention):
    """An attention that a user wrote."""

    def __init__(self, factor: float = 0.5):
        super().__init__()
        self.factor = factor

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        return self.factor * super().forward(query, key, value, **kwargs)


def cores(model: nn.Module) -> list[type]:
    return [type(layer.attention.core) for layer in model.layers]  # type: ignore[union-attr]


def test_a_swap_replaces_components_of_a_type_at_its_paths_and_leaves_the_tree_as_it_was() -> None:
    tree = model_tree(LLAMA3)
    swap = Swap("mine", ScaledDotProductAttention, Halved, "layers.1.*.core", {"factor": 0.25})
    with torch.device("meta"):
        assert cores(rewrite(tree, [swap]).build()) == [ScaledDotProductAttention, Halved]
        assert rewrite(tree, [swap]).build().layers[1].attention.core.factor == 0.25  # type: ignore[union-attr,index]
        everywhere = Swap("mine", ScaledDotProductAttention, Halved)
        assert cores(rewrite(tree, [everywhere]).build()) == [Halved, Halved]
        assert cores(tree.build()) == [ScaledDotProductAttention] * 2


def test_a_replacement_gets_the_arguments_of_what_it_replaces() -> None:
    class Norm(RMSNorm):
        pass

    with torch.device("meta"):
        model = rewrite(model_tree(LLAMA3), [Swap("norm", RMSNorm, Norm, "norm")]).build()
    assert type(model.norm) is Norm
    assert model.norm.weight.shape == (LLAMA3.dim,)


def test_modules_of_a_foreign_model_are_replaced_by_type_and_path() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU()))
    replace_modules(model, [Swap("gelu", nn.ReLU, nn.GELU, "1.1", {"approximate": "tanh"})])
    assert [type(m) for m in model[1].children()] == [nn.ReLU, nn.GELU]
    with pytest.raises(
        ValueError, match=r"gelu replaces Tanh at .*, which the model does not have; it has GELU, Linear"
    ):
        replace_modules(model, [Swap("gelu", nn.Tanh, nn.GELU)])


def test_swaps_that_match_nothing_or_one_node_twice_are_refused() -> None:
    tree = model_tree(LLAMA3)
    with pytest.raises(ValueError, match=r"mine replaces ScaledDotProductAttention at layer.\*, which the model does"):
        rewrite(tree, [Swap("mine", ScaledDotProductAttention, Halved, "layer.*")])
    two = [Swap("a", FeedForward, FeedForward), Swap("b", FeedForward, FeedForward, "layers.1.feed_forward")]
    with pytest.raises(ValueError, match=r"layers.1.feed_forward is replaced by a and by b; leave one out"):
        rewrite(tree, two)


def test_a_dotted_path_that_names_nothing_is_refused() -> None:
    assert load("tests.unit.kernels.test_swap.Halved").__name__ == "Halved"
    for path in ("nowhere.Thing", "tests.unit.kernels.test_swap.Nothing", "Halved"):
        with pytest.raises(ValueError, match=f"{path} cannot be imported: .*; give package.module.Name"):
            load(path)


CUSTOM = ["kernels/attention=custom", "kernels.attention.component=tests.unit.kernels.test_swap.Halved"]


def test_a_kernel_of_the_users_own_takes_effect_by_a_dotted_path_in_the_config() -> None:
    kernels = compose_checked([*CUSTOM, "kernels.attention.options={factor: 0.0}"]).run.kernels
    run = make_run(model=LLAMA3)
    losses = []
    for own in (run.kernels, kernels):
        engine = Engine(make_run(model=LLAMA3, kernels=own), Runtime("cpu"))
        _, metrics = engine.step(engine.initial_state(), random_batches(1, run)[0], 0.0)
        losses.append(float(metrics["loss"]))
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["kernels/attention=splash"],
            "splash is a TPU kernel, and the platform is cpu; choose",
        ),
        (
            ["kernels/attention=splash", "runtime.platform=tpu", "kernels.attention.block_q=100"],
            "block_q=100 is not a mul",
        ),
        (
            ["kernels/attention=splash", "runtime.platform=tpu", "training.seq_len=512"],
            "block_kv=1024 is larger than the sequence length 512; allowed are 128, 256, 512",
        ),
        (
            ["kernels/attention=splash", "runtime.platform=tpu", "kernels.attention.implementation=tokamax"],
            "the attention of tokamax 0.0.12 takes no segment ids",
        ),
        (
            ["kernels/loss=fused", "kernels.loss.implementation=pallas"],
            "pallas is a TPU kernel, and the platform is cpu",
        ),
        (
            ["model=qwen3_moe_debug", "kernels/moe=grouped", "kernels.moe.implementation=pallas"],
            "pallas is a TPU kernel, and the platform is cpu; choose ragged or auto",
        ),
        ([*CUSTOM, "kernels.attention.paths=layer.*"], r"at layer.\*, which the model does not have"),
        (["kernels/attention=custom", "kernels.attention.component=no.Thing"], "no.Thing cannot be imported"),
    ],
)
def test_kernels_that_cannot_run_are_refused_by_the_check(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose_checked(["runtime.platform=cpu", *words])
    assert any(message.replace("\\", "") in str(problem) for problem in refused.value.problems), refused.value.problems


def test_a_mixture_trains_with_grouped_products() -> None:
    kernels = compose_checked(["model=qwen3_moe_debug", "kernels/moe=grouped"]).run.kernels
    run = make_run(model=QWEN3_MOE)
    results = []
    for own in (run.kernels, kernels):
        engine = Engine(make_run(model=QWEN3_MOE, kernels=own), Runtime("cpu"))
        _, metrics = engine.step(engine.initial_state(), random_batches(1, run)[0], 1e-3)
        results.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=0)
