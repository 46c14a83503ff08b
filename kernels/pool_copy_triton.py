"""The copy of `pool_copy` in Triton: a program moves a part of one row, 16 bytes at a time."""

import torch
import triton
import triton.language as tl

from pdkv.kernels.host import Rows
from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_MAX_TILE_WORDS = 2048  # 16 KiB a program

_NUMBERS = (
    "num_outer", "num_inner", "target_outer", "source_outer", "target_inner", "source_inner", "row_quads",
)  # fmt: skip


@jit(do_not_specialize=_NUMBERS)  # so that no layout compiles another variant
def _copy_pieces_kernel(
    target: tl.tensor,  # words of 8 bytes
    source: tl.tensor,
    target_offsets: tl.tensor,  # (n,) bytes
    source_offsets: tl.tensor,
    num_outer: tl.tensor,
    num_inner: tl.tensor,
    target_outer: tl.tensor,  # strides in units of 16 bytes
    source_outer: tl.tensor,
    target_inner: tl.tensor,
    source_inner: tl.tensor,
    row_quads: tl.tensor,
    TILE_WORDS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    inner = (row % num_inner).to(tl.int64)
    outer = (row // num_inner % num_outer).to(tl.int64)
    piece = row // num_inner // num_outer
    words = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    # Twice a number of 16 bytes: the compiler sees that two words always go together, and moves both at once.
    mask = words < row_quads * 2
    to = (tl.load(target_offsets + piece) // 16 + outer * target_outer + inner * target_inner) * 2
    start = (tl.load(source_offsets + piece) // 16 + outer * source_outer + inner * source_inner) * 2
    tl.store(target + to + words, tl.load(source + start + words, mask=mask), mask=mask)


def copy_pieces_triton(
    target: torch.Tensor, source: torch.Tensor, target_offsets: torch.Tensor, source_offsets: torch.Tensor, rows: Rows
) -> None:
    """Launch the kernel; arguments as `copy_pieces` has checked them."""
    num_rows = target_offsets.shape[0] * rows.outer * rows.inner
    if not num_rows:
        return
    row_quads = rows.row_bytes // 16
    tile_words = min(triton.next_power_of_2(2 * row_quads), _MAX_TILE_WORDS)
    strides = (rows.target_outer_stride, rows.source_outer_stride, rows.target_inner_stride, rows.source_inner_stride)
    _copy_pieces_kernel[(num_rows, triton.cdiv(2 * row_quads, tile_words))](
        target.view(torch.int64), source.view(torch.int64), target_offsets, source_offsets,
        rows.outer, rows.inner, *(stride // 16 for stride in strides), row_quads,
        TILE_WORDS=tile_words,
        **LAUNCH_OPTIONS,
    )  # fmt: skip
