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
