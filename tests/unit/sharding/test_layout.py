"""How parameters are laid out: each rule, by hand-computed shapes."""

from typing import Any

import pytest
from torch import nn

from tests.unit.runs import LLAMA3
from tpu_train.models.node import matches
from tpu_train.sharding.layout import HeadSelection, lay_out, lay_out_model, local_shape
from tpu_train.sharding.mesh import MeshShape, fill
from tpu_train.sharding.plan import ParameterRule, Plan, find_rules
from tpu_train.sharding.plans import PLANS
from tpu_train.training.build import build_model

COLUMN, ROW = ParameterRule(tensor_dim=0), ParameterRule(tensor_dim=1)
KEY = ParameterRule(tensor_dim=0, unit=16, query_heads=8)
NO, FSDP, TENSOR, BOTH = (), ("fsdp",), ("tensor",), ("tensor", "fsdp")


@pytest.mark.parametrize(
    ("shape", "mesh", "rule", "stored", "axes", "summed_over"),
    [
        # Nothing to split over: copies, whose gradients are summed over all the data axes.
        ((64, 48), MeshShape(replica=4), COLUMN, (64, 48), (NO, NO), ("replica",)),
        # The first dimension that the axis divides.
        ((64, 48), MeshShape(fsdp=8), COLUMN, (64, 48), (FSDP, NO), ()),
        ((63, 48), MeshShape(fsdp=8), COLUMN, (63, 48), (NO, FSDP), ()),
        ((5, 7, 16), MeshShape(fsdp=8), ParameterRule(), (5, 7, 16), (NO, NO, FSDP), ()),
        # None divides: the first is padded.
        ((509, 63), MeshShape(fsdp=8), COLUMN, (512, 63), (FSDP, NO), ()),
        # Below the size: copies.
        ((9, 9), MeshShape(fsdp=8), COLUMN, (9, 9), (NO, NO), ("fsdp",)),
        ((4096,), MeshShape(replica=2, fsdp=8), ParameterRule(), (4096,), (FSDP,), ("replica",)),
        # Over tensor by columns and rows, fsdp inside it or beside it.
        ((64, 48), MeshShape(fsdp=2, tensor=4), COLUMN, (64, 48), (BOTH, NO), ()),
        ((64, 48), MeshShape(fsdp=2, tensor=4), ROW, (64, 48), (FSDP, TENSOR), ()),
        ((509, 64), MeshShape(fsdp=2, tensor=4), COLUMN, (512, 64), (BOTH, NO), ()),
        ((509, 64), MeshShape(fsdp=3, tensor=4), COLUMN, (512, 66), (TENSOR, FSDP), ()),
        # A vector that tensor splits and fsdp does not divide.
        ((600,), MeshShape(fsdp=7, tensor=2), COLUMN, (600,), (TENSOR,), ("fsdp",)),
        # Two key heads: split over two devices, copies on four, whose gradients are summed.
        ((32, 64), MeshShape(tensor=2), KEY, (32, 64), (TENSOR, NO), ()),
        ((32, 64), MeshShape(fsdp=2, tensor=4), KEY, (32, 64), (FSDP, NO), ("tensor",)),
        # By a rule of the plan.
        ((64, 48), MeshShape(fsdp=8), ParameterRule(fsdp_dim=1), (64, 48), (NO, FSDP), ()),
        ((64, 48), MeshShape(fsdp=8), ParameterRule(fsdp_dim=None), (64, 48), (NO, NO), ("fsdp",)),
    ],
)
def test_each_rule(shape: Any, mesh: MeshShape, rule: Any, stored: Any, axes: Any, summed_over: Any) -> None:
    layout = lay_out("w", shape, mesh, rule, replicate_below=100)
    assert (layout.stored, layout.axes, layout.summed_over) == (stored, axes, summed_over)
    local = local_shape(layout.stored, layout.axes, mesh)
    assert all(size * mesh.size_of(over) == whole for size, over, whole in zip(local, layout.axes, stored, strict=True))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (2, None),  # one key head each
        (4, HeadSelection(2, 8, 1)),  # two devices use the same one
        (8, HeadSelection(2, 8, 1)),
    ],
)
def test_key_heads_on_more_devices_than_there_are(tensor: int, expected: HeadSelection | None) -> None:
    assert lay_out("key", (32, 64), MeshShape(tensor=tensor), KEY).selection == expected


def test_query_heads_that_do_not_share_a_key_head_have_one_each() -> None:
    # Six query heads of three key heads on two devices: 0 0 1 and 1 2 2.
    rule = ParameterRule(tensor_dim=0, unit=16, query_heads=6)
    assert lay_out("key", (48, 64), MeshShape(tensor=2), rule).selection == HeadSelection(3, 6, 3)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="key has 8 query heads, which tensor=3 does not divide"):
        lay_out("key", (32, 64), MeshShape(tensor=3), KEY)


def test_the_plans_of_the_families_name_every_matrix_and_nothing_else() -> None:
    model = build_model(LLAMA3)
    plan = PLANS["llama3"](LLAMA3)
    layouts = lay_out_model(model, MeshShape(tensor=2), plan)
    whole = {name for name, layout in layouts.items() if layout.tensor_dim is None}
    assert whole == {name for name, param in model.named_parameters() if param.ndim == 1}


@pytest.mark.parametrize(
    ("pattern", "path", "fits"),
    [
        ("layers.*.weight", "layers.10.weight", True),
        ("layers.*.weight", "layers.1.attention.weight", False),
        ("*.bias", "a.bias", True),
        ("layers.1*", "layers.12", True),
        ("a.b", "aXb", False),
    ],
)
def test_patterns(pattern: str, path: str, fits: bool) -> None:
    assert matches(pattern, path) is fits


def test_rules_without_a_path_and_paths_with_two_rules_are_refused() -> None:
    with pytest.raises(ValueError, match=r"layer.\* fits none of the model's layers.0"):
        find_rules({"layer.*": 1}, ["layers.0"])
    with pytest.raises(ValueError, match=r"layers.0 fits both layers.\* and \*.0"):
        find_rules({"layers.*": 1, "*.0": 2}, ["layers.0"])


@pytest.mark.parametrize(("over_expert", "axes"), [(True, ("fsdp", "expert")), (False, ("fsdp",))])
def test_a_plan_says_whether_what_is_no_expert_is_split_over_their_axis(
    over_expert: bool, axes: tuple[str, ...]
) -> None:
    plan = Plan(modules={"": "experts"}, dense_over_expert=over_expert)
    (layout, _) = lay_out_model(nn.Linear(4, 8), MeshShape(fsdp=2, expert=2), plan, replicate_below=0).values()
    assert layout.axes[0] == layout.gathered == axes
    assert layout.summed_over == (() if over_expert else ("expert",))


def test_tensor_parallelism_needs_rules() -> None:
    with pytest.raises(ValueError, match="tensor=2: the model's sharding plan has no rules"):
        lay_out_model(nn.Linear(4, 4), MeshShape(tensor=2))


@pytest.mark.parametrize(
    ("sizes", "num_devices", "expected"),
    [
        ({"replica": 1, "fsdp": -1, "tensor": 2}, 8, MeshShape(1, 4, 2)),
        ({"replica": 2, "fsdp": -1, "tensor": 1}, 8, MeshShape(2, 4, 1)),
        ({"replica": 2, "fsdp": 2, "tensor": 2}, 8, MeshShape(2, 2, 2)),
    ],
)
def test_one_size_is_filled(sizes: dict[str, int], num_devices: int, expected: MeshShape) -> None:
    assert fill(sizes, num_devices) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"replica": -1, "fsdp": -1, "tensor": 1}, "replica=-1, fsdp=-1, tensor=1: one axis can be -1"),
        ({"replica": 1, "fsdp": -1, "tensor": 3}, "takes a multiple of 3 devices, and there are 8"),
        ({"replica": 1, "fsdp": 4, "tensor": 1}, "is a mesh of 4 devices, and there are 8"),
    ],
)
def test_sizes_that_do_not_make_up_the_devices_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill(sizes, 8)
