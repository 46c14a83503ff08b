"""Copies between two KV pools in memory: the positions of blocks and units, and one call for all of them.

Every return from a numpy call waits for the GIL, which the step thread may hold: so a copy of many small pieces is one
call of the compiled kernel. Without a compiler, numpy copies a cacheful at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.transfer.planning import Bytes, Ids
from pdkv.connectors.transfer.units import UnitPart
from pdkv.errors import TransferError
from pdkv.kernels import host
from pdkv.wire.kv import KVLayout

COPY_BYTES = 16 * 1024 * 1024
"""Bytes of a copy between checks for a cancel, the deadline and a shutdown."""

_CACHE_BYTES = 512 * 1024


class Pieces(NamedTuple):
    """Equal pieces of two pools, as byte offsets from the pools' beginnings. Each piece consists of `rows` of one
    length; all offsets and strides are multiples of that length.
    """

    target: Ids
    source: Ids
    rows: host.Rows

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece."""
        return self.rows.outer * self.rows.inner * self.rows.row_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return int(self.target.size) * self.piece_bytes

    def cut(self, max_bytes: int) -> Iterator["Pieces"]:
        """The same pieces in parts of at most about `max_bytes`."""
        count = max(max_bytes // self.piece_bytes, 1)
        for first in range(0, self.target.size, count):
            part = slice(first, first + count)
            yield self._replace(target=self.target[part], source=self.source[part])

    def row_offsets(self) -> tuple[Ids, Ids]:
        """The offset of each row: (in the target, in the source)."""
        rows = self.rows
        outer, inner = np.arange(rows.outer)[:, None], np.arange(rows.inner)[None, :]
        target = (outer * rows.target_outer_stride + inner * rows.target_inner_stride).ravel()
        source = (outer * rows.source_outer_stride + inner * rows.source_inner_stride).ravel()
        return (self.target[:, None] + target).ravel(), (self.source[:, None] + source).ravel()

    def check(self, target_bytes: int, source_bytes: int) -> None:
        """Check that everything is within two pools of these sizes. Raises TransferError."""
        rows = self.rows
        reach = [
            (self.target, rows.target_outer_stride, rows.target_inner_stride, target_bytes, "own"),
            (self.source, rows.source_outer_stride, rows.source_inner_stride, source_bytes, "peer's"),
        ]
        for offsets, outer, inner, limit, whose in reach:
            last = (rows.outer - 1) * outer + (rows.inner - 1) * inner + rows.row_bytes
            if offsets.size and (offsets.min() < 0 or int(offsets.max()) + last > limit):
                raise TransferError(
                    f"bytes {offsets.min()} to {int(offsets.max()) + last} exceed the {whose} pool of {limit} bytes"
                )


def block_pieces(layout: KVLayout, theirs: Ids, ours: Ids, layers: range) -> Pieces:
    """Some layers of whole blocks: ours[i] = theirs[i], in two pools of one layout."""
    _check_pairs(theirs, ours)
    first, layer_bytes = layers.start * layout.layer_bytes, layout.layer_bytes
    whole = len(layers) == layout.num_layers
    outer, row_bytes = (1, layout.block_bytes) if whole else (len(layers), layer_bytes)
    rows = host.Rows(outer, layer_bytes, layer_bytes, 1, 0, 0, row_bytes)
    return Pieces(ours * layout.block_bytes + first, theirs * layout.block_bytes + first, rows)


def unit_pieces(own: KVLayout, peer: KVLayout, theirs: Ids, their_first_head: int, ours: Ids, part: UnitPart) -> Pieces:
    """A part of units: ours[i] = theirs[i], whatever the two pools' block sizes and numbers of heads.

    Args:
        their_first_head: the peer's number of the first head of `part`, which uses this rank's numbering.
    """
    _check_pairs(theirs, ours)
    heads = (own.num_kv_heads, peer.num_kv_heads)
    if part.head_stop > heads[0] or their_first_head + part.num_heads > heads[1] or part.layer_stop > own.num_layers:
        raise TransferError(f"{part}, from head {their_first_head} there, exceeds pools of {heads} heads")
    target, source = _unit_offsets(own, ours, part.head_start), _unit_offsets(peer, theirs, their_first_head)
    strides = [layout.block_size * layout.row_bytes for layout in (own, peer)]  # from head to head
    rows = host.Rows(
        own.sides * part.num_layers, strides[0] * heads[0], strides[1] * heads[1],
        part.num_heads, strides[0], strides[1], HASH_BLOCK_SIZE * own.row_bytes,
    )  # fmt: skip
    return Pieces(target + part.layer_start * own.layer_bytes, source + part.layer_start * peer.layer_bytes, rows)


def copy_pieces(target: Bytes, source: Bytes, pieces: Pieces) -> None:
    """Copy pieces of one contiguous pool into another one.

    Raises:
        TransferError: a piece is outside of its pool; nothing is copied.
    """
    pieces.check(target.nbytes, source.nbytes)
    rows = pieces.rows
    if host.available():
        to, start = np.ascontiguousarray(pieces.target), np.ascontiguousarray(pieces.source)
        host.copy_pieces(target.ctypes.data, source.ctypes.data, to, start, rows)
        return
    target_rows, source_rows = (pool.reshape(-1, rows.row_bytes) for pool in (target, source))
    for part in pieces.cut(_CACHE_BYTES):
        to, start = part.row_offsets()
        target_rows[to // rows.row_bytes] = source_rows[start // rows.row_bytes]


def _check_pairs(theirs: Ids, ours: Ids) -> None:
    if theirs.size != ours.size:
        raise TransferError(f"{theirs.size} blocks cannot be copied to {ours.size}")


def _unit_offsets(layout: KVLayout, units: Ids, head: int) -> Ids:
    """The offset of the first row of each unit, from that head on."""
    per_block, token_bytes = layout.block_size // HASH_BLOCK_SIZE, layout.row_bytes
    first: Ids = units // per_block * layout.block_bytes + head * layout.block_size * token_bytes
    return first + units % per_block * (HASH_BLOCK_SIZE * token_bytes)
