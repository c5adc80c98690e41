"""PyTorch tensors as JAX arrays and back, on the CPU; 64-bit integers are 32-bit in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

_TO_JAX = {
    torch.bool: jnp.bool_,
    torch.uint8: jnp.uint8,
    torch.int8: jnp.int8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.int64: jnp.int32,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.uint32: jnp.uint32,
}
_TO_TORCH = {jnp.dtype(kind): dtype for dtype, kind in _TO_JAX.items() if dtype != torch.int64}


def array_spec(x: Any) -> Any:
    """Shape and dtype of a tensor (or array) as JAX has them; None for None."""
    if x is None:
        return None
    if not isinstance(x, Tensor):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if x.dtype not in _TO_JAX:
        raise ValueError(f"a tensor of {x.dtype} has no counterpart in JAX; use one of {', '.join(map(str, _TO_JAX))}")
    return jax.ShapeDtypeStruct(tuple(int(size) for size in x.shape), _TO_JAX[x.dtype])


def empty_like_spec(spec: jax.ShapeDtypeStruct, device: torch.device | str) -> Tensor:
    """A tensor of this shape and dtype whose values do not matter."""
    return torch.empty(spec.shape, dtype=_TO_TORCH[jnp.dtype(spec.dtype)], device=device)


def to_array(x: Tensor | None) -> Any:
    """A CPU tensor's values as an array of JAX's CPU device."""
    if x is None:
        return None
    spec = array_spec(x)
    tensor = x.detach().resolve_conj().contiguous()
    if tensor.dtype == torch.int64:
        tensor = tensor.to(torch.int32)
    if tensor.dtype == torch.bfloat16:  # NumPy has none
        return jnp.asarray(tensor.view(torch.uint16).numpy()).view(jnp.bfloat16)
    return jnp.asarray(tensor.numpy(), spec.dtype)


def to_tensor(x: jax.Array) -> Tensor:
    """An array's values as a CPU tensor of its own."""
    if x.dtype == jnp.bfloat16:
        return torch.tensor(jax.device_get(x).view("uint16")).view(torch.bfloat16)
    return torch.tensor(jax.device_get(x))
