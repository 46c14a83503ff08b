"""Copies between two paged KV pools mapped in this process, in few calls that release the GIL, each with a large piece.

Every return from such a call waits for the GIL, which the step thread holds; a copy of many small blocks therefore
is one call of the compiled kernel, or without it goes in pieces of at least CALL_BYTES.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdkv.connectors.transfer.planning import Ids, Segment, merge_runs, run_starts
from pdkv.errors import TransferError
from pdkv.kernels import host

Bytes = npt.NDArray[np.uint8]

CALL_BYTES = 256 * 1024
"""Least bytes per call on average, below which adjacent blocks on one side only or a staging buffer are used."""

STAGING_BYTES = 512 * 1024
"""Size of the staging buffer: it stays in the second-level cache, so that the second copy is cheap."""


def copy_blocks(source: Bytes, destination: Bytes, source_ids: Ids, destination_ids: Ids, staging: Bytes) -> None:
    """Copy whole blocks: destination[destination_ids[i]] = source[source_ids[i]].

    Args:
        source: (num_source_blocks, block_bytes), C-contiguous.
        destination: (num_destination_blocks, block_bytes), C-contiguous, another pool.
        destination_ids: each at most once.
        staging: a flat private buffer of STAGING_BYTES.

    Raises:
        TransferError: blocks of unequal size, or ids that are not there; nothing is copied.
    """
    block_bytes = source.shape[1]
    if block_bytes != destination.shape[1] or source_ids.size != destination_ids.size:
        raise TransferError(
            f"{source_ids.size} blocks of {block_bytes} bytes cannot go to {destination_ids.size} of "
            f"{destination.shape[1]} bytes"
        )
    for side, ids, blocks in (("source", source_ids, source), ("destination", destination_ids, destination)):
        if ids.size and (ids.min() < 0 or ids.max() >= len(blocks)):
            raise TransferError(f"block ids from {ids.min()} to {ids.max()} in a {side} of {len(blocks)} blocks")
    if host.available():
        rows = host.Rows(1, 0, 0, 1, 0, 0, block_bytes)
        to, start = destination_ids * block_bytes, source_ids * block_bytes
        host.copy_pieces(destination.ctypes.data, source.ctypes.data, to, start, rows)
        return
    max_calls = max(1, source_ids.size * block_bytes // CALL_BYTES)
    runs = merge_runs(source_ids, destination_ids)
    if len(runs) <= max_calls:
        for run in runs:
            destination[run.destination : run.destination + run.num_blocks] = source[
                run.source : run.source + run.num_blocks
            ]
        return
    order = np.argsort(destination_ids, kind="stable")
    starts = run_starts(destination_ids[order])
    if starts.size <= max_calls:
        for part in np.split(order, starts[1:]):
            first = int(destination_ids[part[0]])
            np.take(source, source_ids[part], axis=0, out=destination[first : first + part.size], mode="clip")
        return
    order = np.argsort(source_ids, kind="stable")
    starts = run_starts(source_ids[order])
    if starts.size <= max_calls:
        for part in np.split(order, starts[1:]):
            first = int(source_ids[part[0]])
            destination[destination_ids[part]] = source[first : first + part.size]
        return
    _copy_staged(source, destination, source_ids, destination_ids, staging)


def _copy_staged(source: Bytes, destination: Bytes, source_ids: Ids, destination_ids: Ids, staging: Bytes) -> None:
    """Gather a cacheful of blocks, then scatter it: two calls however the blocks lie."""
    block_bytes = source.shape[1]
    rows = staging.size // block_bytes  # > 0: a block of more than CALL_BYTES goes as a slice
    buffer = staging[: rows * block_bytes].reshape(rows, block_bytes)
    for start in range(0, source_ids.size, rows):
        ids = source_ids[start : start + rows]
        piece = buffer[: ids.size]
        np.take(source, ids, axis=0, out=piece, mode="clip")
        destination[destination_ids[start : start + rows]] = piece


def copy_segments(
    source: Bytes,
    destination: Bytes,
    source_units: Sequence[int],
    units_per_block: int,
    destination_ids: Sequence[int],
    segments: Sequence[Segment],
) -> None:
    """Copy ranges of tokens between pools of unequal block size.

    Args:
        source: (num_source_blocks, …, source_block_size, token_bytes); between them layers * 2 and KV heads.
        destination: (num_blocks, …, block_size, token_bytes).
        source_units: what a segment's source_index names: block * units_per_block + position in the block.
        destination_ids: what a segment's destination_index names.
    """
    unit_tokens = source.shape[-2] // units_per_block
    for segment in segments:
        block, position = divmod(source_units[segment.source_index], units_per_block)
        first = position * unit_tokens + segment.source_offset
        tokens = source[block, ..., first : first + segment.num_tokens, :]
        target = destination[destination_ids[segment.destination_index]]
        offset = segment.destination_offset
        target[..., offset : offset + segment.num_tokens, :] = tokens
