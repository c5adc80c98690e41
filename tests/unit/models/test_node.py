"""The config tree: paths, rewriting, building."""

from fnmatch import fnmatch

import torch
from torch import nn

from tests.unit.models.model_sizes import small_model, small_tree
from tpu_train.models.attention import ScaledDotProductAttention
from tpu_train.models.decoder import DecoderLayer
from tpu_train.models.node import Node, node
from tpu_train.models.norm import RMSNorm


class OtherCore(ScaledDotProductAttention):
    """Stands for a kernel."""


class Wrapper(nn.Module):
    """Stands for a block that contains the one it replaces."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner


def modules_of(model: nn.Module, kind: type[nn.Module]) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, kind)}


def test_rewrite_replaces_by_path_glob():
    tree = small_tree().rewrite(lambda path, _: node(OtherCore) if fnmatch(path, "layers.*.attention.core") else None)
    assert modules_of(tree.build(), OtherCore) == {f"layers.{i}.attention.core" for i in range(3)}


def test_rewrite_replaces_one_layer_only():
    tree = small_tree().rewrite(lambda path, _: node(OtherCore) if path == "layers.1.attention.core" else None)
    assert modules_of(tree.build(), OtherCore) == {"layers.1.attention.core"}


def test_rewrite_replaces_by_type_and_keeps_arguments():
    def use_torch_norm(path: str, found: Node) -> Node | None:
        if found.component is not RMSNorm:
            return None
        return node(nn.RMSNorm, normalized_shape=found.arguments["dim"], eps=found.arguments["eps"])

    tree = small_tree("qwen3")
    model = tree.rewrite(use_torch_norm).build()
    assert modules_of(model, nn.RMSNorm) == modules_of(tree.build(), RMSNorm)
    assert len(modules_of(model, nn.RMSNorm)) == 3 * 4 + 1


def test_model_with_swapped_norm_computes_the_same():
    model = small_model()
    torch_norm = node(nn.RMSNorm, normalized_shape=48, eps=1e-5)
    swapped = small_tree().rewrite(lambda _, found: torch_norm if found.component is RMSNorm else None).build()
    swapped.load_state_dict(model.state_dict())
    tokens, positions = torch.arange(9)[None], torch.arange(9)[None]
    torch.testing.assert_close(swapped(tokens, positions), model(tokens, positions), rtol=1e-5, atol=1e-5)


def test_rewrite_can_wrap_a_node():
    def wrap(path: str, found: Node) -> Node | None:
        return node(Wrapper, inner=found) if found.component is DecoderLayer and not path.endswith(".inner") else None

    model = small_tree().rewrite(wrap).build()
    assert modules_of(model, DecoderLayer) == {f"layers.{i}.inner" for i in range(3)}


def test_rewrite_leaves_the_original_tree():
    tree = small_tree()
    tree.rewrite(lambda path, _: node(OtherCore) if path.endswith(".core") else None)
    assert not modules_of(tree.build(), OtherCore)


def test_layers_of_one_node_are_separate_modules():
    layers = [module for module in small_tree().build().modules() if isinstance(module, DecoderLayer)]
    assert len({id(layer) for layer in layers}) == 3
