"""What the fused projection and loss refuses, and the sizes it picks: plain Python, for the rules of a config too.

Block sizes follow from arithmetic, not from a measurement: a step of the forward reads `(rows + columns) * depth`
elements for `2 * rows * columns * depth` FLOPs, so 1024 x 2048 blocks of bf16 do 683 FLOPs per byte of HBM, over the
560 (v6e) and 166 (v5p) at which a chip's matmuls outrun its memory. To be measured on a TPU: `docs/measurements.md`.
"""

LANES = 128
SUBLANES = 16  # of a bf16 tile; an fp32 tile has 8

ROWS, COLUMNS, DEPTH_BYTES = 1024, 2048, 1024

# v5p and tpu7x have 64 MiB a core, v5e and v6e 128 MiB; the rest is the compiler's.
VMEM_BYTES = 52 * 2**20

# Rows of a block that the kernels' elementwise part works on at once: all at once is unrolled into very long code.
STRIP = 64

# One chunk of the logits' gradient is in HBM at a time. A wide one reads and writes the fp32 gradient of `x` less
# often: `columns / 4` FLOPs per byte, so that 4096 columns are enough on any chip.
CHUNK_BYTES = 128 * 2**20
MIN_CHUNK = 4096


def blocks(num_rows: int, depth: int, vocabulary: int, itemsize: int) -> tuple[int, int, int]:
    """Rows, columns and depth of a block where none are asked for."""
    rows = min(ROWS, -(-num_rows // STRIP) * STRIP)  # whole strips; the last block may overhang
    return rows, min(COLUMNS, vocabulary), min(DEPTH_BYTES // itemsize, depth)


def chunk_columns(num_rows: int, vocabulary: int, itemsize: int, block_columns: int) -> int:
    """Columns of the logits' gradient that are in HBM at a time: whole blocks, or the vocabulary."""
    columns = max(CHUNK_BYTES // (max(num_rows, 1) * itemsize), MIN_CHUNK)
    return min(vocabulary, max(columns // block_columns, 1) * block_columns)


def vmem_bytes(block_rows: int, block_columns: int, block_depth: int, itemsize: int) -> int:
    """VMEM of the kernels: two buffers of operands and result, accumulator and product, and a strip's temporaries."""
    operands = 2 * (block_rows + block_columns) * block_depth * itemsize
    logits = block_rows * block_columns
    vectors = 12 * block_rows * LANES * 4
    return operands + logits * (4 + 4 + 2 * itemsize) + 8 * STRIP * block_columns * 4 + vectors


def check_linear_logsumexp(
    *,
    depth: int,
    vocabulary: int,
    num_rows: int | None = None,
    itemsize: int = 2,
    block_rows: int | None = None,
    block_columns: int | None = None,
    block_depth: int | None = None,
) -> list[str]:
    """What the Pallas kernels refuse.

    Args:
        depth: D of `x` and `weight`.
        vocabulary: rows of the weight on one device.
        num_rows: R of `x`, if it is known.
        itemsize: bytes of an element of `x` and `weight`.
        block_rows: as asked for; None is the kernels' choice. Likewise the others.
        block_columns: a block's part of the vocabulary.
        block_depth: a block's part of D.
    """
    found = [
        *_size("block_rows", block_rows, SUBLANES, "rows", num_rows),
        *_size("block_columns", block_columns, LANES, "vocabulary", vocabulary),
        *_size("block_depth", block_depth, LANES, "model width", depth),
    ]
    rows, columns, deep = blocks(ROWS if num_rows is None else num_rows, depth, vocabulary, itemsize)
    sizes = (block_rows or rows, block_columns or columns, block_depth or deep)
    needed = vmem_bytes(*sizes, itemsize)
    if not found and needed > VMEM_BYTES:
        shape = " x ".join(map(str, sizes))
        found.append(
            f"blocks of {shape} (rows, columns, depth) need {needed / 2**20:.0f} MiB of VMEM; "
            f"{VMEM_BYTES // 2**20} MiB are there; use smaller ones"
        )
    return found


def _size(name: str, value: int | None, multiple: int, what: str, size: int | None) -> list[str]:
    if value is None or value == size:
        return []
    if value <= 0 or value % multiple:
        whole = f", or {size}, the whole {what}" if size is not None else ""
        return [f"{name}={value} is not a positive multiple of {multiple}; use one{whole}"]
    if size is not None and value > size:
        return [f"{name}={value} is larger than the {what} of {size}; use at most {size}"]
    return []
