"""Matrix products and convolutions.

Key idea: every product is one `lax.dot_general` (or one convolution) at the precision of the current context; a
transposed operand stays a transpose, which XLA folds into the product.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from tpu_train.lowering import context
from tpu_train.lowering.dtypes import promote, widen

aten = torch.ops.aten

_PRECISION = {"default": lax.Precision.DEFAULT, "high": lax.Precision.HIGH, "highest": lax.Precision.HIGHEST}


def precision() -> lax.Precision:
    """The precision of the current context, in JAX's terms."""
    return _PRECISION[context.current().matmul_precision]


def _dot(x: Array, y: Array, *, contract: tuple[int, int], batch: int = 0) -> Array:
    batch_dims = tuple(range(batch))
    dimensions = (((contract[0],), (contract[1],)), (batch_dims, batch_dims))
    return lax.dot_general(x, y, dimensions, precision=precision())


def mm(x: Array, y: Array) -> Array:
    return _dot(x, y, contract=(1, 0))


def bmm(x: Array, y: Array) -> Array:
    return _dot(x, y, contract=(2, 1), batch=1)


def mv(x: Array, y: Array) -> Array:
    return _dot(x, y, contract=(1, 0))


def dot(x: Array, y: Array) -> Array:
    return _dot(x, y, contract=(0, 0))


def _add_product(x: Array, product: Array, beta: float, alpha: float) -> Array:
    """`beta * x + alpha * product`; with beta 0, x is ignored even where it is nan."""
    dtype = product.dtype
    if jnp.issubdtype(dtype, jnp.integer):
        beta, alpha = int(beta), int(alpha)  # PyTorch cuts them too
    if alpha != 1:
        product = widen(product) * alpha
    if beta == 0:
        return product.astype(dtype)
    x = widen(x) * beta if beta != 1 else x
    x, product = promote(x, product)
    return (x + product).astype(dtype)


def addmm(x: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return _add_product(x, mm(a, b), beta, alpha)


def baddbmm(x: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return _add_product(x, bmm(a, b), beta, alpha)


def addmv(x: Array, a: Array, b: Array, *, beta: float = 1, alpha: float = 1) -> Array:
    return _add_product(x, mv(a, b), beta, alpha)


def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    spatial = x.ndim - 2
    stride, padding, dilation, output_padding = (
        _per_dim(argument, spatial) for argument in (stride, padding, dilation, output_padding)
    )
    if transposed:
        out = _transposed_convolution(x, weight, stride, padding, dilation, output_padding, groups)
    else:
        out = lax.conv_general_dilated(
            x,
            weight,
            stride,
            [(p, p) for p in padding],
            rhs_dilation=dilation,
            feature_group_count=groups,
            precision=precision(),
        )
    if bias is None:
        return out
    return out + bias.reshape(-1, *(1,) * spatial)


def _per_dim(argument: Sequence[int], spatial: int) -> list[int]:
    """One number per spatial dimension; a single one stands for all."""
    return list(argument) * spatial if len(argument) == 1 else list(argument)


def _transposed_convolution(
    x: Array,
    weight: Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Array:
    """A convolution over the input spread out by the stride; the kernel is flipped, its channel roles exchanged."""
    in_channels, out_per_group, *kernel = weight.shape
    spatial_dims = tuple(range(2, weight.ndim))
    weight = weight.reshape(groups, in_channels // groups, out_per_group, *kernel)
    weight = jnp.swapaxes(weight, 1, 2).reshape(groups * out_per_group, in_channels // groups, *kernel)
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    pads = [(r - p, r - p + extra) for r, p, extra in zip(reach, padding, output_padding, strict=True)]
    return lax.conv_general_dilated(
        x,
        lax.rev(weight, spatial_dims),
        [1] * len(kernel),
        pads,
        lhs_dilation=stride,
        rhs_dilation=dilation,
        feature_group_count=groups,
        precision=precision(),
    )


def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Array | None, Array | None, Array | None]:
    def forward(x: Array, weight: Array) -> Array:
        return convolution(x, weight, None, stride, padding, dilation, transposed, output_padding, groups)

    # The forward product inside the vjp is not used, so XLA removes it; so is a gradient that nobody asked for.
    grad_x, grad_weight = jax.vjp(forward, x, weight)[1](grad)
    grad_bias = jnp.sum(grad, (0, *range(2, grad.ndim))) if output_mask[2] else None
    return grad_x if output_mask[0] else None, grad_weight if output_mask[1] else None, grad_bias


OPS: dict[Any, Callable[..., Any]] = {
    aten.mm.default: mm,
    aten.bmm.default: bmm,
    aten.mv.default: mv,
    aten.dot.default: dot,
    aten.vdot.default: dot,
    aten.addmm.default: addmm,
    aten.baddbmm.default: baddbmm,
    aten.addmv.default: addmv,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
