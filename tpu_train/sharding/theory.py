"""How many collectives a layout must lead to, by theory: what the captured graph's are compared with.

Key idea: every collective has an owner (a parameter, a module, or a quantity of the step), so the count is a sum over
owners of what each needs: FSDP (ZeRO-3) a gather per use and pass and a reduce-scatter, copies a sum per step, a
tensor-parallel region a gather and a scatter in each pass.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

from tpu_train.sharding.layout import Layout
from tpu_train.sharding.mesh import DATA_AXES, MeshShape
from tpu_train.sharding.plan import ModuleRule

# Owners of what is summed to compute the loss; all other sums are of gradients.
OF_THE_LOSS = ("weight", "loss")
When = Literal["forward", "backward", "update"]


class Use(NamedTuple):
    """A kind of collective: its op, axes (joined by +), owner, and the part of the step that has it."""

    op: str
    axes: str
    label: str
    when: When


# Forward and backward of what a module does with its activations.
_REGIONS: Mapping[ModuleRule, tuple[str, str]] = {
    "gather_input": ("all_gather", "reduce_scatter"),
    "gather_output": ("all_gather", "reduce_scatter"),
    "scatter_output": ("reduce_scatter", "all_gather"),
    "vocabulary": ("reduce_scatter", "all_gather"),
}


def expected(
    layouts: Mapping[str, Layout],
    regions: Mapping[str, ModuleRule],
    mesh: MeshShape,
    *,
    trainable: Collection[str],
    looked_up: Collection[str],
    num_microbatches: int,
    reshard: bool,
    split_vocabulary: bool,
    metrics: Collection[str] = (),
) -> Counter[Use]:
    """Collectives of one device in one training step.

    Args:
        layouts: of the parameters.
        regions: rule of each module that acts by one on this mesh.
        mesh: its shape.
        trainable: parameters that have gradients.
        looked_up: parameters that are only read by rows, whose derivative does not need them.
        num_microbatches: of a step.
        reshard: weights are gathered again for the backward.
        split_vocabulary: the loss is taken over logits that are split over `tensor`.
        metrics: sums that the objective reports besides the loss.
    """
    count: Counter[Use] = Counter()
    for layout in layouts.values():
        _of_parameter(
            count, layout, num_microbatches, layout.name in trainable, reshard and layout.name not in looked_up
        )
    for path, rule in regions.items():
        if rule == "experts":  # everybody's counts; rows there and back
            count[Use("all_gather", "expert", path, "forward")] += num_microbatches
            count[Use("exchange", "expert", path, "forward")] += 2 * num_microbatches
            count[Use("exchange", "expert", path, "backward")] += 2 * num_microbatches
        else:
            forward, backward = _REGIONS[rule]
            count[Use(forward, "tensor", path, "forward")] += num_microbatches
            count[Use(backward, "tensor", path, "backward")] += num_microbatches
    if split_vocabulary:  # the largest logit; the sum of exponentials and the label's logit
        count[Use("all_reduce", "tensor", "loss", "forward")] += 2 * num_microbatches
    if data := mesh.real(DATA_AXES):
        for quantity in OF_THE_LOSS:
            count[Use("all_reduce", "+".join(data), quantity, "forward")] += 1
        for quantity in metrics:
            count[Use("all_reduce", "+".join(data), quantity, "update")] += 1
    for axes in {layout.split_over for name, layout in layouts.items() if name in trainable} - {()}:
        count[Use("all_reduce", "+".join(axes), "grad_norm", "update")] += 1
    return count


def _of_parameter(count: Counter[Use], layout: Layout, num_microbatches: int, trained: bool, again: bool) -> None:
    """Adds a parameter's: `again` for gathering it anew in the backward."""
    for axis in layout.gathered:
        count[Use("all_gather", axis, layout.name, "forward")] += num_microbatches
        if again:
            count[Use("all_gather", axis, layout.name, "backward")] += num_microbatches
        if trained:
            count[Use("reduce_scatter", axis, layout.name, "backward")] += num_microbatches
    if layout.summed_over and trained:
        count[Use("all_reduce", "+".join(layout.summed_over), layout.name, "update")] += 1
