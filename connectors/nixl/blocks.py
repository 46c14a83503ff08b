"""Whole blocks between engines of equal layout: large runs as they lie, the others, if they are many, by gathering.

What may land late is all gathered: then it lands in buffers that are not used again if it fails, and not in the pool.
"""

from itertools import pairwise

import numpy as np

from pdkv.connectors.nixl.endpoint import NixlEndpoint, Waiting
from pdkv.connectors.nixl.fetch import GatherReader, Guard, Wanted
from pdkv.connectors.nixl.wire import RankBlob
from pdkv.connectors.transfer.planning import Ids, run_starts
from pdkv.connectors.transfer.small_pieces import Gate
from pdkv.connectors.transfer.units import UnitPool

POST_BYTES = 8 * 1024 * 1024
"""Of one post: between two of them a cancel, the deadline and a shutdown are seen."""

PIECE_BYTES = 24 * 1024
"""What a piece costs beside its bytes, in bytes: a call of the kernel."""

Post = tuple[Ids, Ids, Ids]
"""Byte offsets at the source, at the destination, and sizes, of what is posted at once."""


class BlockReader:
    """Reads a peer's blocks into own ones. Thread-safe."""

    def __init__(self, endpoint: NixlEndpoint, units: UnitPool, reader: GatherReader, gate: Gate) -> None:
        self._endpoint = endpoint
        self._units = units
        self._reader = reader
        self._gate = gate

    def read(
        self, job: Waiting, blob: RankBlob, theirs: Ids, ours: Ids, layers: range, *, offer: int, guard: Guard
    ) -> int:
        """As PoolReader.read_blocks."""
        units, block_bytes = self._units, blob.block_bytes
        layer_bytes = block_bytes // units.num_layers
        whole = len(layers) == units.num_layers
        starts = run_starts(theirs, ours) if whole else np.arange(theirs.size)
        counts = np.diff(starts, append=theirs.size)
        first, sizes = layers.start * layer_bytes, (counts - 1) * block_bytes + len(layers) * layer_bytes
        table = np.stack([theirs[starts] * block_bytes + first, ours[starts] * block_bytes + first, sizes], axis=1)
        small = np.ones_like(starts, dtype=np.bool_) if self._endpoint.may_land_late else self._gate.choose(sizes)
        self._read_pieces(job, blob, table[~small], guard)
        if small.any():
            rest = np.repeat(small, counts)
            ids = [expand_blocks(blocks[rest], units.units_per_block) for blocks in (theirs, ours)]
            part = units.whole._replace(layer_start=layers.start, layer_stop=layers.stop)
            self._reader.fetch(job, blob, Wanted(ids[0], 0, ids[1], part, offer, guard))
        return int(theirs.size) * len(layers) * layer_bytes

    def _read_pieces(self, job: Waiting, blob: RankBlob, table: Ids, guard: Guard) -> None:
        endpoint, pool = self._endpoint, self._endpoint.pool
        assert pool is not None
        for theirs, ours, sizes in cut_pieces(table):
            job.check()
            with guard():
                endpoint.read(job, blob, (pool, ours), (blob.pool, theirs), sizes)


def cut_pieces(table: Ids, limit: int = POST_BYTES) -> list[Post]:
    """Pieces as posts that take about equally long, of at most about `limit` bytes.

    Args:
        table: (n, 3): source, destination and size of each, in bytes.
    """
    if not table.size:
        return []
    parts = -(-table[:, 2] // limit)  # of each piece
    pieces = np.repeat(table, parts, axis=0)
    offsets = (np.arange(len(pieces)) - np.repeat(np.cumsum(parts) - parts, parts)) * limit
    sources, destinations, sizes = pieces[:, 0] + offsets, pieces[:, 1] + offsets, pieces[:, 2] - offsets
    sizes = np.minimum(sizes, limit)
    posts = (np.cumsum(sizes + PIECE_BYTES) - 1) // limit
    cuts = [0, *(np.flatnonzero(np.diff(posts)) + 1).tolist(), len(posts)]
    return [(sources[a:b], destinations[a:b], sizes[a:b]) for a, b in pairwise(cuts)]


def expand_blocks(block_ids: Ids, units_per_block: int) -> Ids:
    """The units of whole blocks."""
    units: Ids = (block_ids[:, None] * units_per_block + np.arange(units_per_block)).ravel()
    return units
