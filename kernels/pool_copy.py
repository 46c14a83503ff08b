"""Copies from one KV pool straight into another on a device: the counterpart of host.c's `pdkv_copy`."""

import torch

from pdkv.kernels.host import Rows

_QUAD_BYTES = 16
"""What the kernel moves at a time: every offset, stride and row is a multiple of it."""


def copy_pieces(
    target: torch.Tensor, source: torch.Tensor, target_offsets: torch.Tensor, source_offsets: torch.Tensor, rows: Rows
) -> None:
    """Copy equal pieces between two pools that do not overlap, on the current stream of the target's device.

    The caller has checked that all pieces lie within the pools; the source may be on another device that this one can
    access, and mapped from another process.

    Args:
        target, source: uint8, flat, contiguous, aligned to 16 bytes.
        target_offsets, source_offsets: (n,) int64 offsets in bytes, on the target's device.
        rows: the shape and strides of every piece; strides and the bytes of a row are multiples of 16.

    Raises:
        ValueError: a stride or size is not a multiple of 16.
    """
    sizes = [rows.target_outer_stride, rows.source_outer_stride, rows.target_inner_stride, rows.source_inner_stride]
    if any(size % _QUAD_BYTES for size in (*sizes, rows.row_bytes)):
        raise ValueError(f"strides and bytes of rows must be multiples of {_QUAD_BYTES}, got {rows}")
    if target.is_cuda:
        from pdkv.kernels.pool_copy_triton import copy_pieces_triton

        copy_pieces_triton(target, source, target_offsets, source_offsets, rows)
    else:
        copy_pieces_reference(target, source, target_offsets, source_offsets, rows)


def copy_pieces_reference(
    target: torch.Tensor, source: torch.Tensor, target_offsets: torch.Tensor, source_offsets: torch.Tensor, rows: Rows
) -> None:
    """What `copy_pieces` does, in torch; offsets and strides are multiples of a row's size, as in `Pieces`."""
    outer = torch.arange(rows.outer, device=target_offsets.device).unsqueeze(1)
    inner = torch.arange(rows.inner, device=target_offsets.device).unsqueeze(0)
    to = (outer * rows.target_outer_stride + inner * rows.target_inner_stride).view(-1)
    start = (outer * rows.source_outer_stride + inner * rows.source_inner_stride).view(-1)
    to = (target_offsets.unsqueeze(1) + to).view(-1) // rows.row_bytes
    start = (source_offsets.unsqueeze(1) + start).view(-1) // rows.row_bytes
    picked = source.view(-1, rows.row_bytes).index_select(0, start)
    target.view(-1, rows.row_bytes).index_copy_(0, to, picked)
