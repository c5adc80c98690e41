"""The choices of `parallelism`: one set of keys, whose defaults in `conf/parallelism` make the choices."""

import dataclasses
from typing import Literal

from tpu_train.config.fields import FloatName, at_least, axis_size, key


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleParallelism:
    """One device."""

    name: Literal["single"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshParallelism:
    """Devices as a mesh with the axes replica, fsdp and tensor; one of their sizes may be -1: what the others leave."""

    replica: int | None = key(
        "Copies of the sharded model, whose gradients are summed; null: one for each slice, or 2 where there is one.",
        rule=axis_size,
        unit="devices",
    )
    fsdp: int = key("Devices that each parameter and its optimizer state are split over.", rule=axis_size)
    tensor: int = key("Devices that each matrix product is split over.", rule=axis_size)
    expert: int = key("Devices that the experts of a mixture are split over, to which tokens are sent.", rule=axis_size)
    expert_bound: float = key(
        "Tokens that a device has room for in expert parallelism, as a multiple of those it sends; more are dropped "
        "and counted. Ignored where expert is 1.",
        rule=at_least(1),
    )
    reshard_after_forward: bool = key(
        "Whether weights are gathered anew for the backward, or kept from the forward; ignored where fsdp is 1."
    )
    reduce: FloatName = key("Dtype in which gradients are summed over devices.")
    replicate_below: int = key(
        "Parameters of fewer elements are not split over fsdp.", rule=at_least(0), unit="elements"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DdpParallelism(MeshParallelism):
    """Data parallel: the whole model on each device."""

    name: Literal["ddp"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpParallelism(MeshParallelism):
    """Fully sharded data parallel (ZeRO-3): each device has a part of every parameter."""

    name: Literal["fsdp"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fsdp2dParallelism(MeshParallelism):
    """Hybrid sharding (HSDP): sharded inside a slice, replicated over slices."""

    name: Literal["fsdp_2d"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpParallelism(MeshParallelism):
    """Tensor parallel with sequence-parallel norms."""

    name: Literal["tp"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpTpParallelism(MeshParallelism):
    """Fully sharded data parallel over groups of tensor-parallel devices."""

    name: Literal["fsdp_tp"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpParallelism(MeshParallelism):
    """Expert parallel: data parallel with the experts of a mixture split over all devices."""

    name: Literal["ep"] = key("Parallelism.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpEpParallelism(MeshParallelism):
    """Fully sharded data parallel, with the experts of a mixture split over groups of devices."""

    name: Literal["fsdp_ep"] = key("Parallelism.")
