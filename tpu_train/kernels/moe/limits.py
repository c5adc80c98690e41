"""What the grouped matmul refuses, and the sizes it picks: plain Python, for the rules of a config too.

Block sizes are those MaxText ships for megablox (512 rows, 1024 x 1024), or the largest whole part of a dimension
below: 768 for a width of 1536, of which blocks of 1024 would waste a quarter. To be measured on a TPU.
"""

LANES = 128
SUBLANES = 16  # of a bf16 tile; an fp32 tile has 8

ROWS, WIDTH = 512, 1024

# The compiler's default for one kernel on v5p, which megablox does not raise.
VMEM_BYTES = 16 * 2**20

# Megablox counts the groups that start in a block of rows by an fp32 histogram, whose bins are wrong from about 2900
# blocks on (the edge of the last but one rounds onto the integer above it).
MAX_ROW_BLOCKS = 2048


def row_block(num_rows: int) -> int:
    """Rows of a block where none are asked for."""
    return min(ROWS, row_block_limit(num_rows))


def width_block(width: int, itemsize: int) -> int:
    """A block's part of a weight's dimension where none is asked for."""
    most = WIDTH * 2 // max(itemsize, 2)
    if width <= most:
        return width
    whole = [size for size in range(most // 2, most + 1, LANES) if width % size == 0]
    return max(whole, default=most)


def vmem_bytes(block_rows: int, block_in: int, block_out: int, itemsize: int) -> int:
    """VMEM of the largest of the three kernels: two buffers of operands and result, and an fp32 accumulator."""
    x, grad, weight = block_rows * block_in, block_rows * block_out, block_in * block_out
    return 2 * itemsize * (x + grad + weight) + 4 * max(x, grad, weight)


def check_grouped_matmul(
    *,
    in_width: int,
    out_width: int,
    num_rows: int | None = None,
    itemsize: int = 2,
    block_rows: int | None = None,
    block_in: int | None = None,
    block_out: int | None = None,
) -> list[str]:
    """What the Pallas kernels refuse.

    Args:
        in_width: of the weight, [E, out, in].
        out_width: likewise.
        num_rows: T of `x`, if it is known.
        itemsize: bytes of an element of `x` and `weight`.
        block_rows: as asked for; None is the kernels' choice. Likewise the others.
        block_in: a block's part of `in`.
        block_out: a block's part of `out`.
    """
    found = [
        *_size("block_rows", block_rows, SUBLANES, None if num_rows is None else row_block_limit(num_rows), "rows"),
        *_size("block_in", block_in, LANES, in_width, "weight's input width"),
        *_size("block_out", block_out, LANES, out_width, "weight's output width"),
    ]
    sizes = (
        block_rows or row_block(ROWS if num_rows is None else num_rows),
        block_in or width_block(in_width, itemsize),
        block_out or width_block(out_width, itemsize),
    )
    if not found and (needed := vmem_bytes(*sizes, itemsize)) > VMEM_BYTES:
        shape = " x ".join(map(str, sizes))
        found.append(
            f"blocks of {shape} (rows, in, out) need {needed / 2**20:.1f} MiB of VMEM; "
            f"{VMEM_BYTES // 2**20} MiB are there; use smaller ones"
        )
    if not found and num_rows is not None and (count := -(-num_rows // sizes[0])) > MAX_ROW_BLOCKS:
        found.append(
            f"block_rows={sizes[0]} makes {count} blocks of {num_rows} rows; at most {MAX_ROW_BLOCKS} are counted "
            f"right; use at least {-(-num_rows // MAX_ROW_BLOCKS // SUBLANES) * SUBLANES}"
        )
    return found


def row_block_limit(num_rows: int) -> int:
    """The largest block of rows: all of them, padded to whole sublanes."""
    return -(-num_rows // SUBLANES) * SUBLANES


def _size(name: str, value: int | None, multiple: int, size: int | None, what: str) -> list[str]:
    if value is None or value == size:
        return []
    if value <= 0 or value % multiple:
        whole = f", or {size}, the whole {what}" if size is not None and multiple == LANES else ""
        return [f"{name}={value} is not a positive multiple of {multiple}; use one{whole}"]
    if size is not None and value > size:
        return [f"{name}={value} is larger than the {what} of {size}; use at most {size}"]
    return []
