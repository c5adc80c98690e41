"""What the attention implementations can take, as rules on plain numbers.

Here and not beside the kernels, so that a config is checked before JAX is started. The functions raise the same texts.
"""

import math
from collections.abc import Sequence

# Lanes of a TPU vector register: block sizes of the kernel end up as the minor dimension of some operand.
LANES = 128
# Sublanes of one: what the TPU compiler takes as head_dim, without padding (tests/tpu_compile/test_attention.py).
HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256


def check_shapes(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    query_segment_ids: Sequence[int] | None,
    key_segment_ids: Sequence[int] | None,
) -> list[str]:
    """What is wrong with the shapes of attention's arrays, for every implementation."""
    if not len(query) == len(key) == len(value) == 4:
        return [f"query, key and value have {len(query)}, {len(key)} and {len(value)} dimensions; allowed is 4 each"]
    problems = []
    batch, num_heads, seq_len, head_dim = query
    if tuple(key) != tuple(value):
        problems.append(f"key {list(key)} and value {list(value)} differ in shape; give both [B, K, S, N]")
    if (key[0], *key[2:]) != (batch, seq_len, head_dim):
        problems.append(
            f"key {list(key)} does not go with query {list(query)}; queries and keys are the same tokens, so only the "
            "number of heads may differ"
        )
    problems += check_heads(num_heads, key[1])
    if (query_segment_ids is None) != (key_segment_ids is None):
        problems.append("segment ids of queries and keys are given together; one of them is None")
    for name, shape in [("query_segment_ids", query_segment_ids), ("key_segment_ids", key_segment_ids)]:
        if shape is not None and tuple(shape) != (batch, seq_len):
            problems.append(f"{name} {list(shape)} is not [B, S] = {[batch, seq_len]}")
    return problems


def check_heads(num_heads: int, num_kv_heads: int) -> list[str]:
    """Whether consecutive query heads can share a key head."""
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        return [f"{num_kv_heads} key heads do not divide {num_heads} query heads; allowed are {_list(divisors)}"]
    return []


def check_window(window: int | None) -> list[str]:
    """Whether a window holds at least the query's own token."""
    if window is not None and window < 1:
        return [f"window={window} lets a query see nothing; use at least 1 (the token itself), or None for all earlier"]
    return []


def check_blockwise(*, window: int | None = None, block_q: int = 1, block_kv: int = 1) -> list[str]:
    """What `blockwise_attention` cannot take of its options; every sequence length and head_dim is allowed."""
    blocks = {"block_q": block_q, "block_kv": block_kv}
    return [*check_window(window), *(f"{k}={v} holds no token; use at least 1" for k, v in blocks.items() if v < 1)]


def check_splash(
    seq_len: int,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
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
) -> list[str]:
    """What `splash_attention` cannot take, one text per problem; none when it can run.

    Args:
        seq_len: S.
        head_dim: N.
        num_heads: H, of one device.
        num_kv_heads: K, of one device.
        window: see `splash_attention`, as all that follow.
        block_q: likewise.
        block_kv: likewise.
        block_kv_compute: likewise.
        block_q_dkv: likewise.
        block_kv_dkv: likewise.
        block_kv_dkv_compute: likewise.
        block_q_dq: likewise.
        block_kv_dq: likewise.
        fused_backward: likewise.
        interpret: likewise; changes no limit.
    """
    del interpret
    problems = [*check_heads(num_heads, num_kv_heads), *check_window(window)]
    if not 1 <= head_dim <= MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE:
        problems.append(
            f"head_dim {head_dim} is not a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}; "
            "use another implementation"
        )
    if fused_backward:
        problems += [
            f"{name}={value} is of the dq kernel, which fused_backward=true replaces; leave it out"
            for name, value in [("block_q_dq", block_q_dq), ("block_kv_dq", block_kv_dq)]
            if value is not None
        ]
    if seq_len < 1 or seq_len % LANES:
        nearest = LANES * max(1, math.ceil(seq_len / LANES))
        return [*problems, f"sequence length {seq_len} is not a multiple of {LANES}; the next is {nearest}"]
    blocks = {"block_q": block_q, "block_kv": block_kv, "block_q_dkv": block_q_dkv, "block_kv_dkv": block_kv_dkv}
    if not fused_backward:
        blocks |= {"block_q_dq": block_q_dq, "block_kv_dq": block_kv_dq}
    for name, block in blocks.items():
        if block is not None:
            problems += _check_block(name, block, "sequence length", seq_len)
    problems += _check_compute("block_kv_compute", block_kv_compute, "block_kv", block_kv)
    kv_dkv = block_kv if block_kv_dkv is None else block_kv_dkv
    inherited = block_kv_dkv_compute is None
    if not (inherited and block_kv_dkv is None):  # else it is the forward's pair again
        compute = block_kv_compute if block_kv_dkv_compute is None else block_kv_dkv_compute
        origin = " (from block_kv_compute)" if inherited else ""
        problems += _check_compute("block_kv_dkv_compute", compute, "block_kv_dkv", kv_dkv, origin)
    return problems


def _check_compute(name: str, value: int, outer_name: str, outer: int, origin: str = "") -> list[str]:
    """A compute block against the block it is a part of; of one that is wrong itself, nothing is said here."""
    if outer < LANES or outer % LANES:
        return []
    return _check_block(name, value, outer_name, outer, origin)


def _check_block(name: str, value: int, outer_name: str, outer: int, origin: str = "") -> list[str]:
    if value >= LANES and value % LANES == 0 and outer % value == 0:
        return []
    allowed = [block for block in range(LANES, outer + 1, LANES) if outer % block == 0]
    if value < LANES or value % LANES:
        reason = f"is not a multiple of {LANES}"
    elif value > outer:
        reason = f"is larger than the {outer_name} {outer}"
    else:
        reason = f"does not divide the {outer_name} {outer}"
    return [f"{name}={value}{origin} {reason}; allowed are {_list(allowed)}"]


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
