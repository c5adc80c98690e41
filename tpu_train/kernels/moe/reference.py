"""What the grouped matmul computes, in plain PyTorch: the definition the kernels are tested against."""

import torch
from torch import Tensor


def grouped_matmul(x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
    """Rows of `x`, sorted by group, times the transpose of their group's weight.

    Every row is multiplied by every group's weight and what is not its own is dropped: no sizes on the host, and E
    times the work.

    Args:
        x: [T, in]; the first `group_sizes[0]` rows are of group 0, and so on.
        weight: [E, out, in], each group's as a linear layer has it.
        group_sizes: integers [E], of a sum of at most T.

    Returns:
        [T, out] in the dtype of `x`; zeros in rows beyond the last group. Sums are in fp32 (fp64 for fp64 inputs).
    """
    precise = torch.promote_types(x.dtype, torch.float32)
    ends = group_sizes.cumsum(0)
    rows = torch.arange(x.shape[0], device=x.device)
    out = x.new_zeros(x.shape[0], weight.shape[1], dtype=precise)
    for group in range(weight.shape[0]):
        end = ends[group]
        own = (rows >= end - group_sizes[group]) & (rows < end)
        out = torch.where(own[:, None], x.to(precise) @ weight[group].to(precise).T, out)
    return out.to(x.dtype)
