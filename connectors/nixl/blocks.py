"""Whole blocks between engines of equal layout: large runs as they lie, the others, if they are many, by gathering."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from pdkv.connectors.nixl.endpoint import NixlEndpoint, Waiting
from pdkv.connectors.nixl.fetch import GatherReader, Guard, Wanted
from pdkv.connectors.nixl.wire import RankBlob
from pdkv.connectors.transfer.planning import Ids, Run, run_starts
from pdkv.connectors.transfer.small_pieces import Gate
from pdkv.connectors.transfer.units import UnitPart, UnitPool

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
        num_layers, block_bytes = self._units.num_layers, blob.block_bytes
        if len(layers) == num_layers:
            return self._read_whole(job, blob, theirs, ours, offer, guard)
        num_bytes = block_bytes // num_layers * len(layers)
        if self._gate.gathers(theirs.size, num_bytes):
            units = [expand_blocks(blocks, self._units.units_per_block) for blocks in (theirs, ours)]
            part = UnitPart(0, self._units.num_heads, layers.start, layers.stop)
            self._reader.fetch(job, blob, Wanted(units[0], 0, units[1], part, offer, guard))
        else:
            self._read_pieces(job, blob, layer_pieces(theirs, ours, block_bytes, layers, num_layers), guard)
        return int(theirs.size) * num_bytes

    def _read_whole(self, job: Waiting, blob: RankBlob, theirs: Ids, ours: Ids, offer: int, guard: Guard) -> int:
        starts = run_starts(theirs, ours)
        counts = np.diff(starts, append=theirs.size)
        small_runs = self._gate.choose(counts * blob.block_bytes)
        large = starts[~small_runs]
        table = np.stack([theirs[large], ours[large], counts[~small_runs]], axis=1) * blob.block_bytes
        self._read_pieces(job, blob, table, guard)
        if small_runs.any():
            rest = np.repeat(small_runs, counts)
            small = [expand_blocks(blocks[rest], self._units.units_per_block) for blocks in (theirs, ours)]
            self._reader.fetch(job, blob, Wanted(small[0], 0, small[1], self._units.whole, offer, guard))
        return int(theirs.size) * blob.block_bytes

    def _read_pieces(self, job: Waiting, blob: RankBlob, table: Ids, guard: Guard) -> None:
        endpoint, pool = self._endpoint, self._endpoint.pool
        assert pool is not None

        for theirs, ours, sizes in cut_pieces(table):
            job.check()
            with guard():
                endpoint.read(blob, (pool, ours), (blob.pool, theirs), sizes, deadline=job.deadline, check=job.check)


def cut_runs(runs: Sequence[Run], block_bytes: int) -> list[Post]:
    """Runs of blocks as posts of at most about POST_BYTES."""
    return cut_pieces(np.asarray(runs, dtype=np.int64).reshape(-1, 3) * block_bytes)


def cut_layers(source: Ids, destination: Ids, block_bytes: int, layers: range, num_layers: int) -> list[Post]:
    """Some layers of blocks source[i] and destination[i], one piece per block, as posts of about POST_BYTES."""
    return cut_pieces(layer_pieces(source, destination, block_bytes, layers, num_layers))


def layer_pieces(source: Ids, destination: Ids, block_bytes: int, layers: range, num_layers: int) -> Ids:
    """Some layers of blocks source[i] and destination[i], (n, 3): source, destination and size in bytes."""
    layer_bytes = block_bytes // num_layers
    first, size = layers.start * layer_bytes, np.full(source.size, len(layers) * layer_bytes, dtype=np.int64)
    return np.stack([source * block_bytes + first, destination * block_bytes + first, size], axis=1)


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
