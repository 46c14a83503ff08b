"""Sizes that matrix products on CPU are rounded up to.

oneDNN compiles a kernel for every new shape (0.4 ms) and keeps it (0.6 MB): without rounding, every step of a mixed
load would compile some, and the kernels would outweigh a small model.
"""


def round_rows(count: int) -> int:
    """The padded number of rows of a step: exact up to 16 (few decodes), else a multiple of 8, 16 or 32: at most 32 /
    1024 is wasted.
    """
    if count <= 16:
        return count
    step = 8 if count <= 64 else 16 if count <= 1024 else 32
    return -(-count // step) * step


def round_queries(count: int) -> int:
    """The padded number of queries of a tile."""
    return next((size for size in (1, 2, 4, 8, 16, 32, 48, 64, 96) if count <= size), -(-count // 64) * 64)


def round_blocks(count: int, block_size: int) -> int:
    """The padded number of KV blocks of a bucket: eight sizes per doubling of the tokens."""
    step = max(1, (1 << max(0, (count * block_size - 1).bit_length() - 4)) // block_size)
    return -(-count // step) * step


def round_tiles(count: int) -> tuple[int, int]:
    """(largest allowed number of tiles that is at most `count`, smallest that is at least `count`)."""
    power = 1 << (count.bit_length() - 1)
    allowed = [power, power + power // 2, 2 * power] if power > 1 else [1, 2]
    return max(size for size in allowed if size <= count), min(size for size in allowed if size >= count)
