"""How each parameter is stored: which of its dimensions are split over which axes, and what is padded for it.

Key idea: a layout is decided once, from the shape alone, and everything reads it: the traced step, initialization,
optimizer state, checkpoints. Stored arrays may be longer than the parameter; what is added is zero and stays zero.
"""

import dataclasses
import math
from collections.abc import Mapping

from torch import nn

from tpu_train.sharding.mesh import AXES, DATA_AXES, SHARD_AXES, DimAxes, MeshShape
from tpu_train.sharding.plan import NO_PLAN, NO_RULE, ParameterRule, Plan, find_rules

# Below it a parameter is not split over `fsdp`: a gather of some kilobytes costs its latency, and the copies are small.
REPLICATE_BELOW = 32_768


@dataclasses.dataclass(frozen=True)
class HeadSelection:
    """Which heads of a replicated key or value projection a device along `tensor` uses.

    Device t's query head j is head t * q + j of all, q = query_heads / tensor, and shares key head
    (t * q + j) * num_heads // query_heads.

    Attributes:
        num_heads: of the projection.
        query_heads: that share them.
        count: heads that a device uses: one, or (where its query heads do not share one) one for each query head.
    """

    num_heads: int
    query_heads: int
    count: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter is stored.

    Attributes:
        name: full name.
        shape: of the parameter.
        stored: shape of the stored array, which is longer where it is padded.
        axes: for each dimension the axes it is split over.
        gathered: axes that it is split over and gathered along to be used: fsdp, or fsdp and expert.
        fsdp_dim: dimension that is; None: none.
        tensor_dim: dimension split over `tensor`; None: none.
        selection: of the heads of a projection that is replicated over `tensor`.
        summed_over: axes over which devices hold parts of its gradient's sum when the backward is done.
    """

    name: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    axes: DimAxes
    gathered: tuple[str, ...]
    fsdp_dim: int | None
    tensor_dim: int | None
    selection: HeadSelection | None
    summed_over: tuple[str, ...]

    @property
    def split_over(self) -> tuple[str, ...]:
        """All axes that it is split over, in the order of the mesh."""
        used = {axis for axes in self.axes for axis in axes}
        return tuple(axis for axis in AXES if axis in used)


def local_shape(shape: tuple[int, ...], axes: DimAxes, mesh: MeshShape) -> tuple[int, ...]:
    """The shape of one device's part."""
    return tuple(size // mesh.size_of(over) for size, over in zip(shape, axes, strict=True))


def lay_out(
    name: str,
    shape: tuple[int, ...],
    mesh: MeshShape,
    rule: ParameterRule = NO_RULE,
    replicate_below: int = REPLICATE_BELOW,
    dense_over_expert: bool = True,
) -> Layout:
    """Lays out one parameter.

    Over `tensor` and `expert` as its rule says; a dimension that `tensor` does not divide is padded. Over `fsdp` (with
    `dense_over_expert` and no experts: over `fsdp` and `expert` together):

    1. with less than `replicate_below` elements on a device (after the other splits): not at all;
    2. along the first dimension that the axis divides;
    3. where it divides none, along the first one that nothing else splits, padded to the next multiple;
    4. where there is none either (a vector that `tensor` splits): not at all.

    Raises:
        ValueError: heads that `tensor` or experts that `expert` does not divide, or a dimension that is not there.
    """
    for dim in (rule.tensor_dim, rule.fsdp_dim, rule.expert_dim):
        if isinstance(dim, int) and dim >= len(shape):
            raise ValueError(f"sharding plan: {name} has {len(shape)} dimensions, and its rule splits dimension {dim}")
    tensor_dim, selection = _over_tensor(name, shape, mesh, rule)
    before: list[tuple[str, ...]] = [("tensor",) if dim == tensor_dim else () for dim in range(len(shape))]
    if rule.expert_dim is not None and mesh.expert > 1:
        if shape[rule.expert_dim] % mesh.expert:
            raise ValueError(f"{name} has {shape[rule.expert_dim]} experts, which expert={mesh.expert} does not divide")
        before[rule.expert_dim] = ("expert",)
    whole = dense_over_expert and rule.expert_dim is None
    gathered = mesh.real(SHARD_AXES if whole else ("fsdp",))
    stored = [_round_up(size, mesh.size_of(over)) for size, over in zip(shape, before, strict=True)]
    parts = [size // mesh.size_of(over) for size, over in zip(stored, before, strict=True)]
    free = [dim for dim, over in enumerate(before) if not over]
    fsdp_dim = _over_fsdp(parts, free, mesh.size_of(gathered), rule, replicate_below)
    axes = [over + (gathered if dim == fsdp_dim else ()) for dim, over in enumerate(before)]
    stored = [_round_up(size, mesh.size_of(over)) for size, over in zip(stored, axes, strict=True)]
    used = {axis for over in axes for axis in over}
    pending = [axis for axis in (*DATA_AXES, "tensor") if axis not in used]
    return Layout(
        name,
        shape,
        tuple(stored),
        tuple(axes),
        gathered if fsdp_dim is not None else (),
        fsdp_dim,
        tensor_dim,
        selection,
        mesh.real(tuple(pending)),
    )


def _over_tensor(
    name: str, shape: tuple[int, ...], mesh: MeshShape, rule: ParameterRule
) -> tuple[int | None, HeadSelection | None]:
    if rule.tensor_dim is None or mesh.tensor == 1:
        return None, None
    units = shape[rule.tensor_dim] // rule.unit
    if rule.unit == 1 or units % mesh.tensor == 0:
        return rule.tensor_dim, None
    heads = rule.query_heads or units
    if heads % mesh.tensor:
        raise ValueError(f"{name} has {heads} query heads, which tensor={mesh.tensor} does not divide")
    assert rule.tensor_dim == 0
    return None, HeadSelection(units, heads, 1 if mesh.tensor % units == 0 else heads // mesh.tensor)


def _over_fsdp(parts: list[int], free: list[int], fsdp: int, rule: ParameterRule, replicate_below: int) -> int | None:
    if fsdp == 1 or not parts:
        return None
    if rule.fsdp_dim != "auto":
        return rule.fsdp_dim
    if math.prod(parts) < replicate_below:
        return None
    even = [dim for dim, size in enumerate(parts) if size % fsdp == 0]
    return next(iter(even or free), None)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def lay_out_model(
    model: nn.Module, mesh: MeshShape, plan: Plan = NO_PLAN, replicate_below: int = REPLICATE_BELOW
) -> Mapping[str, Layout]:
    """The layout of every parameter by full name.

    Raises:
        ValueError: a rule of the plan fits nothing, or does not fit its parameter; `tensor` is asked for without rules.
    """
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    rules = find_rules(plan.parameters, list(shapes))
    kinds = set(plan.modules.values())
    if mesh.tensor > 1 and not kinds - {"experts"}:
        raise ValueError(f"tensor={mesh.tensor}: the model's sharding plan has no rules for tensor parallelism")
    if mesh.expert > 1 and "experts" not in kinds:
        raise ValueError(f"expert={mesh.expert}: the model's sharding plan has no rule for experts")
    return {
        name: lay_out(name, shape, mesh, rules.get(name, NO_RULE), replicate_below, plan.dense_over_expert)
        for name, shape in shapes.items()
    }
