"""SimpleFSDP (Zhang et al. 2024, arXiv:2411.00284): a sharded parameter is a DTensor, and using it is a redistribution.

Key idea: no module hooks. `redistribute(Replicate())` traces to an all-gather, its derivative to a reduce-scatter, and
both are ordinary nodes of the step's graph, which the compiler schedules beside the arithmetic.
"""

import dataclasses

import torch
from torch import Tensor
from torch.fx import traceback as fx_traceback

from tpu_train.sharding.layout import Layout
from tpu_train.sharding.mesh import traced_mesh

# Key under which a node's `meta["custom"]` names the parameter that is gathered.
LABEL = "collective"


@dataclasses.dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of a parameter on its way.

    Attributes:
        compute: of floating-point weights in forward and backward; they are cast before they are gathered.
        reduce: in which gradients are summed over devices.
    """

    compute: torch.dtype
    reduce: torch.dtype


def gather_parameter(shard: Tensor, layout: Layout, precision: MixedPrecision) -> Tensor:
    """The parameter, in the compute dtype, of this device's shard; still split over `tensor` where its layout says so.

    Its gradient is summed over `fsdp` and split as the shard is.
    """
    compute = precision.compute if shard.is_floating_point() else shard.dtype
    if layout.fsdp_dim is None:
        return shard.to(compute)
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    device_mesh = traced_mesh().device_mesh[layout.gathered]
    each = len(layout.gathered)
    with fx_traceback.annotate({LABEL: layout.name}):
        sharded = DTensor.from_local(shard, device_mesh, [Shard(layout.fsdp_dim)] * each, run_check=False)
        whole = sharded.redistribute(
            placements=[Replicate()] * each, forward_dtype=compute, backward_dtype=precision.reduce
        ).to_local(grad_placements=[Partial("sum")] * each)
    padded = layout.fsdp_dim != layout.tensor_dim and layout.stored[layout.fsdp_dim] != layout.shape[layout.fsdp_dim]
    return whole.narrow(layout.fsdp_dim, 0, layout.shape[layout.fsdp_dim]) if padded else whole
