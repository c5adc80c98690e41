"""Attention's result and gradients on the CPU, in one run: the whole S x S at once, PyTorch's own, and by blocks.

The contenders take turns, one call each, so that whatever else the machine does hits all of them; results and
gradients of all must agree, or the times mean nothing. Prints medians, ratios and what XLA sets aside beside inputs
and outputs.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch.nn import functional as F

from tpu_train.execution.host_memory import keep_freed_memory
from tpu_train.kernels.attention.blockwise import blockwise_attention
from tpu_train.kernels.attention.cases import Case

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}  # of two that each differ from the truth by the half

Call = Callable[[], Sequence[np.ndarray]]


def plain_attention(query: Array, key: Array, value: Array) -> Array:
    """Softmax of the whole S x S, as one writes it in JAX."""
    batch, _, seq_len, head_dim = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, seq_len, head_dim)
    scores = jnp.einsum("bkgsn,bktn->bkgst", grouped, key, preferred_element_type=jnp.float32)
    visible = jnp.tril(jnp.ones((seq_len, seq_len), bool))
    weights = jax.nn.softmax(jnp.where(visible, scores / math.sqrt(head_dim), -jnp.inf)).astype(value.dtype)
    return jnp.einsum("bkgst,bktn->bkgsn", weights, value).reshape(query.shape)


def jax_call(attention: Callable[..., Array], case: Case) -> tuple[Call, int]:
    """The call, and its temporary bytes."""
    arrays = [jnp.asarray(x) for x in case.arrays()]

    def run(query: Array, key: Array, value: Array, out_grad: Array) -> Any:
        out, vjp = jax.vjp(attention, query, key, value)
        return out, *vjp(out_grad)

    compiled = jax.jit(run).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return lambda: jax.block_until_ready(compiled(*arrays)), memory.temp_size_in_bytes


def torch_call(case: Case) -> Call:
    dtype = getattr(torch, case.dtype)
    query, key, value, out_grad = (torch.from_numpy(x.astype(np.float32)).to(dtype) for x in case.arrays())
    heads = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())

    def run() -> Sequence[Any]:
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out.detach(), *torch.autograd.grad(out, heads, out_grad)

    return run


def to_float(x: Any) -> np.ndarray:
    return x.float().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float32)


def measure(calls: dict[str, Call], steps: int, tolerance: float) -> dict[str, float]:
    """Median seconds of each, after one call to warm up, whose results are compared."""
    results = {name: [to_float(x) for x in call()] for name, call in calls.items()}
    first = next(iter(results.values()))
    for name, found in results.items():
        for ours, theirs in zip(found, first, strict=True):
            error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            assert error <= tolerance, f"{name} differs by {error:.1e}"
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(steps):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--blocks", nargs="*", default=["256x256"], metavar="QxKV", help="block sizes, one contender each"
    )
    parser.add_argument(
        "--keep-memory", action="store_true", help="as training does: freed memory stays with the process"
    )
    parser.add_argument("--without-plain", action="store_true", help="where S x S does not fit")
    return parser.parse_args()


def main() -> None:
    options = parse()
    jax.config.update("jax_platforms", "cpu")
    if options.keep_memory:
        keep_freed_memory()
    sizes = (options.seq_len, options.num_heads, options.num_kv_heads, options.head_dim)
    case = Case(*sizes, options.dtype, documents=((),) * options.batch)
    calls, temporary = {}, {}
    if not options.without_plain:
        calls["plain"], temporary["plain"] = jax_call(plain_attention, case)
    calls["torch"] = torch_call(case)
    for blocks in options.blocks:
        block_q, block_kv = map(int, blocks.split("x"))

        def by_blocks(*heads: Array, block_q: int = block_q, block_kv: int = block_kv) -> Array:
            query, key, value = heads
            return blockwise_attention(query, key, value, None, None, block_q=block_q, block_kv=block_kv)

        calls[blocks], temporary[blocks] = jax_call(by_blocks, case)
    seconds = measure(calls, options.steps, TOLERANCE[options.dtype])
    base = next(iter(seconds.values()))
    print(f"{case}, batch {case.batch}, {options.steps} calls each")
    for name, taken in seconds.items():
        memory = f"{temporary[name] / 1e6:8.1f} MB temporary" if name in temporary else ""
        print(f"{name:>10} {taken:8.4f} s {taken / base:7.3f} x {memory}")


if __name__ == "__main__":
    main()
