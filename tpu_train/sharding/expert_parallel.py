"""Expert parallelism: each device along `expert` has some of the experts, and tokens go to them and back.

Key idea: a device's rows are sorted by expert, so those for one device are one piece; a table of all devices' counts
says which piece goes where, and everybody computes the same from it. Rows arrive by source and are put in the order of
the device's own experts by one gather, in the backward by its inverse. No row is dropped while a device gets at most
`bound` times as many as it sends; beyond that the last ones are, and counted.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tpu_train.models.moe import permute
from tpu_train.sharding.collectives import Moves, axis_index, exchange, gather_whole
from tpu_train.sharding.mesh import MeshShape

_AXIS = "expert"


class Arrival(NamedTuple):
    """What a device gets, and how it is put in the order of its experts.

    Attributes:
        moves: of the rows.
        permutation: int [rows], which arrived row each place of the sorted order has.
        inverse: int [rows].
        group_sizes: int32 [E / n], rows of each of its experts, of all sources.
        dropped: int32 0-d, rows that did not fit on this device.
    """

    moves: Moves
    permutation: Tensor
    inverse: Tensor
    group_sizes: Tensor
    dropped: Tensor


def plan_arrival(group_sizes: Tensor, rows: int, size: int, label: str) -> Arrival:
    """From each device's counts [E] to who sends what where.

    Args:
        group_sizes: int32 [E], of this device's rows by expert.
        rows: that a device has room for.
        size: devices along the axis (n).
        label: the layer.
    """
    counts = gather_whole(group_sizes.unsqueeze(0), _AXIS, size, label).unflatten(1, (size, -1))  # [source, dest, E/n]
    wanted = counts.sum(2, dtype=torch.int32)
    starts = _before(wanted, 1)  # a source's rows are sorted by expert, so by destination
    places = _before(wanted, 0).clamp(max=rows)
    sizes = (rows - places).clamp(min=0).minimum(wanted)
    me = axis_index(_AXIS)
    own = counts.index_select(1, me.reshape(1)).squeeze(1)  # [source, E/n]
    # Which of a source's rows were cut off: the last ones, by expert.
    fitting = (sizes.index_select(1, me.reshape(1)) - _before(own, 1)).clamp(min=0).minimum(own)
    expert = _expert_of_slots(fitting, places.index_select(1, me.reshape(1)).squeeze(1), rows)
    permutation = expert.sort(stable=True).indices
    dropped = (wanted - sizes).index_select(1, me.reshape(1)).sum(dtype=torch.int32)
    return Arrival(
        Moves(sizes, starts, places),
        permutation,
        permutation.sort().indices,
        fitting.sum(0, dtype=torch.int32),
        dropped,
    )


def _before(counts: Tensor, dim: int) -> Tensor:
    """The sum of the entries before each, along a dimension."""
    return (counts.cumsum(dim) - counts).to(torch.int32)


def _expert_of_slots(counts: Tensor, places: Tensor, rows: int) -> Tensor:
    """The expert of each arrived row, int [rows]; those of no row come last.

    Args:
        counts: int32 [source, E/n], rows by source and expert.
        places: int32 [source], where a source's rows begin.
        rows: slots.
    """
    begins = places.unsqueeze(1) + _before(counts, 1)
    slot = torch.arange(rows, dtype=torch.int32).reshape(-1, 1, 1)
    inside = (slot >= begins) & (slot < begins + counts)  # [rows, source, E/n]
    experts = torch.arange(counts.shape[1], dtype=torch.int32)
    found = torch.where(inside, experts, 0).sum((1, 2), dtype=torch.int32)
    return torch.where(inside.flatten(1).any(1), found, counts.shape[1])


def over_experts(
    module: nn.Module, path: str, mesh: MeshShape, bound: float, dropped: list[Tensor]
) -> Callable[..., Tensor]:
    """The forward of stacked experts (`models.moe.Experts`) of which each device has some.

    Args:
        module: the experts.
        path: of the module.
        mesh: its shape.
        bound: rows that a device has room for, as a multiple of those that it sends.
        dropped: gets the number of rows that did not fit, 0-d int32, of each call.
    """
    forward, size = module.forward, mesh.expert

    def wrapped(x: Tensor, group_sizes: Tensor, product: nn.Module) -> Tensor:
        rows = math.ceil(len(x) * bound)
        arrival = plan_arrival(group_sizes, rows, size, path)
        dropped.append(arrival.dropped)
        y = forward(send(x, arrival, rows, size, path), arrival.group_sizes, product)
        return send_back(y, arrival, len(x), size, path)

    return wrapped


def send(x: Tensor, arrival: Arrival, rows: int, size: int, label: str) -> Tensor:
    """The rows [A, D] of all devices for this device's experts, sorted by them, [rows, D]."""
    arrived = exchange(x, arrival.moves, rows, _AXIS, size, label)
    return permute(arrived, arrival.permutation, arrival.inverse, 1)


def send_back(y: Tensor, arrival: Arrival, num_rows: int, size: int, label: str) -> Tensor:
    """The results [rows, D] to where their rows came from, [A, D]; zeros for dropped rows."""
    unsorted = permute(y, arrival.inverse, arrival.permutation, 1)
    return exchange(unsorted, arrival.moves.back(), num_rows, _AXIS, size, label)
