"""JAX's Pallas splash attention for TPUs (Dao 2023, arXiv:2307.08691, with blocks skipped by a static mask).

Key idea: the kernels are JAX's; ours are the mask, computed block by block on the host and element by element in the
kernel, and the derivative's rule, which keeps query as it came in. (JAX's own rule would keep it scaled: a second copy
of it per layer.) Key and value heads are never repeated: the kernels' index maps share them among query heads.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from tpu_train.kernels.attention.limits import check_shapes, check_splash


@dataclasses.dataclass(frozen=True)
class _Options:
    """The static options, each with its value."""

    window: int | None
    blocks: kernels.BlockSizes
    interpret: bool


def splash_attention(
    query: Array,
    key: Array,
    value: Array,
    query_segment_ids: Array | None,
    key_segment_ids: Array | None,
    *,
    window: int | None = None,
    block_q: int = 512,
    block_kv: int = 1024,
    block_kv_compute: int = 512,
    block_q_dkv: int | None = None,
    block_kv_dkv: int | None = None,
    block_kv_dkv_compute: int | None = None,
    block_q_dq: int | None = None,
    block_kv_dq: int | None = None,
    fused_backward: bool = False,
    interpret: bool = False,
) -> Array:
    """`reference_attention` as TPU kernels: one forward, and two backward or one.

    All block sizes are in tokens, multiples of 128, and divide what they are blocks of.

    Args:
        query: [B, H, S, N].
        key: [B, K, S, N]; K divides H, and consecutive query heads share a key head.
        value: [B, K, S, N].
        query_segment_ids: int32 [B, S], or None when all tokens of a sequence may see each other.
        key_segment_ids: int32 [B, S], given with `query_segment_ids`.
        window: how many of the latest tokens a query sees, itself included; None for all earlier ones.
        block_q: queries per block of the forward kernel.
        block_kv: keys per block that the forward kernel loads.
        block_kv_compute: keys of a loaded block per matmul.
        block_q_dkv: queries per block of the kernel of key's and value's gradients; None for `block_q`.
        block_kv_dkv: keys per block that it loads; None for `block_kv`.
        block_kv_dkv_compute: keys of a loaded block per matmul; None for `block_kv_compute`.
        block_q_dq: queries per block of the kernel of query's gradient; None for `block_q`.
        block_kv_dq: keys per block of it; None for `block_kv`.
        fused_backward: that kernel is left out, and the other writes query's gradient too: one part of query's size
            and dtype per block of `block_kv_dkv` keys, which are then summed. Memory grows with S * S / block_kv_dkv.
        interpret: the kernels are interpreted, on any device, slowly; to test them without a TPU.

    Returns:
        [B, H, S, N], in query's dtype.

    Raises:
        ValueError: all that `check_splash` finds, or shapes that do not go together.
    """
    segment_shapes = [None if ids is None else ids.shape for ids in (query_segment_ids, key_segment_ids)]
    problems = check_shapes(query.shape, key.shape, value.shape, *segment_shapes)
    sizes: dict[str, Any] = {
        "block_q": block_q,
        "block_kv": block_kv,
        "block_kv_compute": block_kv_compute,
        "block_q_dkv": block_q_dkv,
        "block_kv_dkv": block_kv_dkv,
        "block_kv_dkv_compute": block_kv_dkv_compute,
        "block_q_dq": block_q_dq,
        "block_kv_dq": block_kv_dq,
    }
    if not problems:
        _, num_heads, seq_len, head_dim = query.shape
        heads = (num_heads, key.shape[1])
        problems = check_splash(seq_len, head_dim, *heads, window=window, fused_backward=fused_backward, **sizes)
    if problems:
        raise ValueError("splash attention: " + "\n".join(problems))
    options = _Options(window, _block_sizes(fused_backward, **sizes), interpret)
    segments = None
    if query_segment_ids is not None and key_segment_ids is not None:
        segments = kernels.SegmentIds(query_segment_ids, key_segment_ids)
    return _splash(options, query, key, value, segments)


def _block_sizes(fused_backward: bool, **sizes: Any) -> kernels.BlockSizes:
    """With the backward's sizes that are left out taken from the forward."""
    for name, forward in [
        ("block_q_dkv", "block_q"),
        ("block_kv_dkv", "block_kv"),
        ("block_kv_dkv_compute", "block_kv_compute"),
        *([] if fused_backward else [("block_q_dq", "block_q"), ("block_kv_dq", "block_kv")]),
    ]:
        sizes[name] = sizes[forward] if sizes[name] is None else sizes[name]
    return kernels.BlockSizes(use_fused_bwd_kernel=fused_backward, **sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _splash(options: _Options, query: Array, key: Array, value: Array, segments: Any) -> Any:
    return jax.vmap(_kernel(options, query))(_scaled(query), key, value, segments)


def _splash_forward(options: _Options, query: Array, key: Array, value: Array, segments: Any) -> Any:
    kernel = _kernel(options, query, save_residuals=True)
    out, (log_sum_exp,) = jax.vmap(kernel)(_scaled(query), key, value, segments)
    return out, (query, key, value, segments, out, log_sum_exp)


def _splash_backward(options: _Options, residuals: Any, out_grad: Array) -> Any:
    query, key, value, segments, out, log_sum_exp = residuals
    kernel = _kernel(options, query)
    infos = (kernel.dq_mask_info, kernel.dkv_mask_info)

    def one_sequence(*arrays: Any) -> tuple[Array, Array, Array]:
        query, key, value, segments, out, log_sum_exp, out_grad = arrays
        # JAX has no public name for the backward kernels alone; jax is pinned to one release.
        grads = kernels._splash_attention_bwd(
            res=(query, key, value, segments, None, out, log_sum_exp, *infos),
            do=out_grad,
            **kernel.kwargs,
        )
        return grads[3], grads[4], grads[5]

    grads = jax.vmap(one_sequence)(_scaled(query), key, value, segments, out, log_sum_exp, out_grad)
    return _scaled(grads[0]), grads[1], grads[2], None


_splash.defvjp(_splash_forward, _splash_backward)


def _scaled(query: Array) -> Array:
    """Query or its gradient times 1/sqrt(N), which the kernels leave to us, rounded once."""
    return (query.astype(jnp.float32) / math.sqrt(query.shape[-1])).astype(query.dtype)


def _kernel(options: _Options, query: Array, *, save_residuals: bool = False) -> kernels.SplashAttentionKernel:
    """JAX's kernels for one sequence."""
    _, num_heads, seq_len, _ = query.shape
    return kernels.make_splash_mha(
        masks.MultiHeadMask([_CausalMask(seq_len, options.window)] * num_heads),
        block_sizes=options.blocks,
        save_residuals=save_residuals,
        head_shards=1,
        q_seq_shards=1,
        interpret=options.interpret,
    )


@dataclasses.dataclass(frozen=True)
class _CausalMask(masks.Mask):
    """Which keys a query sees by their places; segments are the kernel's.

    JAX asks for it block by block to find out which are full, empty or neither. A full or empty one is given as a
    single element: at 32,768 tokens the whole, element by element, would be 10^9 comparisons per kernel.
    """

    seq_len: int
    window: int | None

    @property
    def shape(self) -> tuple[int, int]:
        return (self.seq_len, self.seq_len)

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.seq_len, dtype=np.int32)

    def mask_function(self, query_tokens: Any, key_tokens: Any) -> Any:
        """The elements, on the host or in the kernel."""
        visible = key_tokens <= query_tokens
        return visible if self.window is None else visible & (query_tokens - key_tokens < self.window)

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = block
        age_min, age_max = queries.start - (keys.stop - 1), (queries.stop - 1) - keys.start
        window = self.seq_len if self.window is None else self.window
        if age_max < 0 or age_min >= window:
            return np.zeros((1, 1), np.bool_)
        if age_min >= 0 and age_max < window:
            return np.ones((1, 1), np.bool_)
        tokens = np.arange(queries.start, queries.stop)[:, None], np.arange(keys.start, keys.stop)
        return self.mask_function(*tokens)
