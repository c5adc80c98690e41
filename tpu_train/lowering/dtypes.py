"""PyTorch dtypes as JAX dtypes, and PyTorch's promotion rule for JAX arrays.

Integers are 32-bit in JAX unless 64-bit mode is on: `torch.int64` then lowers to `int32`. A graph for
which `interpreter.needs_64_bit` holds (float64 tensors, or an integer constant beyond 32 bits) is lowered
in 64-bit mode.
"""

import jax
import jax.numpy as jnp
import torch
from jax import Array

_TO_JAX: dict[torch.dtype, type] = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int64,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float64: jnp.float64,
}
_TO_TORCH = {jnp.dtype(v): k for k, v in _TO_JAX.items()}

Scalar = bool | int | float
Operand = Array | Scalar


def jax_dtype(dtype: torch.dtype) -> jnp.dtype:
    """The JAX dtype that holds `dtype`: 64-bit types become 32-bit ones outside 64-bit mode.

    Raises:
        ValueError: complex and quantized dtypes, which TPUs do not have.
    """
    if dtype not in _TO_JAX:
        raise ValueError(f"{dtype} has no TPU equivalent; use one of {', '.join(str(d) for d in _TO_JAX)}")
    return jax.dtypes.canonicalize_dtype(_TO_JAX[dtype])


def torch_dtype(dtype: jnp.dtype) -> torch.dtype:
    """The PyTorch dtype of the same name."""
    return _TO_TORCH[jnp.dtype(dtype)]


def result_dtype(*operands: Operand) -> jnp.dtype:
    """PyTorch's type promotion (`torch.result_type`): 0-d tensors and numbers do not widen within their category."""
    dtypes = {operand.dtype for operand in operands if isinstance(operand, Array)}
    if len(dtypes) == 1 and all(isinstance(operand, Array) for operand in operands):
        return dtypes.pop()  # the usual case, and tracing a large graph asks for it thousands of times
    result: torch.Tensor | Scalar | None = None
    for operand in operands:
        if isinstance(operand, Array):
            value = torch.empty((1,) * operand.ndim, dtype=torch_dtype(operand.dtype), device="meta")
        else:
            value = operand
        result = value if result is None else _join(result, value)
    if not isinstance(result, torch.Tensor):
        result = torch.tensor(result, device="meta")
    return jax_dtype(result.dtype)


def _join(a: "torch.Tensor | Scalar", b: "torch.Tensor | Scalar") -> torch.Tensor:
    ndim = max((x.ndim for x in (a, b) if isinstance(x, torch.Tensor)), default=0)
    return torch.empty((1,) * ndim, dtype=torch.result_type(a, b), device="meta")


def promote(*operands: Operand) -> list[Array]:
    """The operands as arrays of their common dtype by PyTorch's rule."""
    dtype = result_dtype(*operands)
    return [jnp.asarray(x, dtype) for x in operands]


def compute_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """The dtype PyTorch's kernels calculate in: float32 for the 16-bit floats, else `dtype` itself."""
    return jnp.dtype(jnp.float32) if dtype in (jnp.bfloat16, jnp.float16) else dtype


def widen(x: Array) -> Array:
    """`x` in its `compute_dtype`: for formulas of several steps, which are rounded once at their end."""
    return x.astype(compute_dtype(x.dtype))


def promote_float(*operands: Operand) -> list[Array]:
    """Like `promote`, integers and booleans becoming PyTorch's default float (float32)."""
    dtype = result_dtype(*operands)
    if not jnp.issubdtype(dtype, jnp.floating):
        dtype = jnp.dtype(jnp.float32)
    return [jnp.asarray(x, dtype) for x in operands]
