"""Modules that call a kernel, in the place of a model's reference modules."""

from typing import Any

from torch import Tensor, nn

from tpu_train.kernels import ops


class KernelAttention(nn.Module):
    """The attention core (see `models.attention.ScaledDotProductAttention`) by one of `ops.ATTENTION`.

    For training: queries and keys are the same tokens.
    """

    def __init__(self, kernel: str, **options: Any):
        """Takes the kernel's name and its options."""
        super().__init__()
        self.op = ops.ATTENTION[kernel]
        self.options = options

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        query_segment_ids: Tensor | None = None,
        key_segment_ids: Tensor | None = None,
        cursor: Tensor | int | None = None,
    ) -> Tensor:
        """Mixes values by causal attention within segments; arguments as of the reference."""
        if cursor is not None:
            raise ValueError(f"{self.op.name} is a kernel for training, and a cache was given; use attention=reference")
        return self.op(query, key, value, query_segment_ids, key_segment_ids, **self.options)


class KernelProduct(nn.Module):
    """The experts' product (see `models.moe.GroupedProduct`) by one of `ops.MOE`."""

    def __init__(self, kernel: str, **options: Any):
        """Takes the kernel's name and its options."""
        super().__init__()
        self.op = ops.MOE[kernel]
        self.options = options

    def forward(self, x: Tensor, weight: Tensor, group_sizes: Tensor) -> Tensor:
        """Multiplies consecutive groups of rows; arguments as of the reference."""
        return self.op(x, weight, group_sizes, **self.options)
