"""Whole blocks between engines of equal layout: large runs as they lie, the others, if they are many, by gathering."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from pdkv.connectors.nixl_endpoint import NixlEndpoint
from pdkv.connectors.nixl_fetch import GatherReader, Guard, Waiting, Wanted
from pdkv.connectors.nixl_options import NixlOptions
from pdkv.connectors.nixl_wire import RankBlob
from pdkv.connectors.planning import Ids, Run, split_runs
from pdkv.connectors.units import UnitPart, UnitPool

POST_BYTES = 8 * 1024 * 1024
"""Of one post: between two of them a cancel, the deadline and a shutdown are seen."""

Post = tuple[Ids, Ids, Ids]
"""Byte offsets at the source, at the destination, and sizes, of what is posted at once."""


class BlockReader:
    """Reads a peer's blocks into own ones. Thread-safe."""

    def __init__(self, endpoint: NixlEndpoint, units: UnitPool, reader: GatherReader, options: NixlOptions) -> None:
        self._endpoint = endpoint
        self._units = units
        self._reader = reader
        self._options = options

    def read_layers(
        self, job: Waiting, blob: RankBlob, theirs: Ids, ours: Ids, layers: range, *, offer: int, guard: Guard
    ) -> int:
        """As `read`, some layers of the blocks only."""
        num_layers, block_bytes = self._units.num_layers, blob.block_bytes
        if len(layers) == num_layers:
            return self.read(job, blob, theirs, ours, offer=offer, guard=guard)
        num_bytes = block_bytes // num_layers * len(layers)
        if theirs.size < self._options.gather_min_pieces or num_bytes >= self._options.gather_below:
            self._read_posts(job, blob, cut_layers(theirs, ours, block_bytes, layers, num_layers), guard)
        else:
            units = [expand_blocks(blocks, self._units.units_per_block) for blocks in (theirs, ours)]
            part = UnitPart(0, self._units.num_heads, layers.start, layers.stop)
            self._reader.fetch(job, blob, Wanted(units[0], 0, units[1], part, offer, guard))
        return int(theirs.size) * num_bytes

    def read(
        self, job: Waiting, blob: RankBlob, theirs: Ids, ours: Ids, *, offer: int = 0, guard: Guard = nullcontext
    ) -> int:
        """Read theirs[i] into ours[i].

        Args:
            offer: the peer's number for them, in a push.
            guard: a context around each write into the own pool.

        Returns:
            The bytes.

        Raises:
            TransferError: the peer refuses or is gone, the job has to stop.
        """
        split = split_runs(theirs, ours, -(-self._options.gather_below // blob.block_bytes))
        rest = split_runs(theirs[split.rest], ours[split.rest], 1).runs
        if len(rest) < self._options.gather_min_pieces:
            self._read_runs(job, blob, [*split.runs, *rest], guard)
        else:
            self._read_runs(job, blob, split.runs, guard)
            small = [expand_blocks(blocks[split.rest], self._units.units_per_block) for blocks in (theirs, ours)]
            self._reader.fetch(job, blob, Wanted(small[0], 0, small[1], self._units.whole, offer, guard))
        return int(theirs.size) * blob.block_bytes

    def _read_runs(self, job: Waiting, blob: RankBlob, runs: Sequence[Run], guard: Guard) -> None:
        self._read_posts(job, blob, cut_runs(runs, blob.block_bytes), guard)

    def _read_posts(self, job: Waiting, blob: RankBlob, posts: Sequence[Post], guard: Guard) -> None:
        endpoint = self._endpoint
        assert endpoint.pool is not None
        for theirs, ours, sizes in posts:
            job.check()
            with guard():
                endpoint.read(
                    blob, (endpoint.pool, ours), (blob.pool, theirs), sizes, deadline=job.deadline, check=job.check
                )


def cut_runs(runs: Sequence[Run], block_bytes: int) -> list[Post]:
    """Runs of blocks as posts of about POST_BYTES."""
    pieces: list[tuple[int, int, int]] = []
    for run in runs:
        size = run.num_blocks * block_bytes
        for offset in range(0, size, POST_BYTES):
            source, destination = run.source * block_bytes + offset, run.destination * block_bytes + offset
            pieces.append((source, destination, min(POST_BYTES, size - offset)))
    if not pieces:
        return []
    return _posts(np.asarray(pieces, dtype=np.int64))


def cut_layers(source: Ids, destination: Ids, block_bytes: int, layers: range, num_layers: int) -> list[Post]:
    """Some layers of blocks source[i] and destination[i], one piece per block, as posts of about POST_BYTES."""
    layer_bytes = block_bytes // num_layers
    first, size = layers.start * layer_bytes, np.full(source.size, len(layers) * layer_bytes, dtype=np.int64)
    return _posts(np.stack([source * block_bytes + first, destination * block_bytes + first, size], axis=1))


def _posts(table: Ids) -> list[Post]:
    """(source, destination, size) of pieces, (n, 3), n > 0."""
    posts = (np.cumsum(table[:, 2]) - 1) // POST_BYTES
    cuts = np.flatnonzero(np.diff(posts)) + 1
    return [(batch[:, 0], batch[:, 1], batch[:, 2]) for batch in np.split(table, cuts)]


def expand_blocks(block_ids: Ids, units_per_block: int) -> Ids:
    """The units of whole blocks."""
    units: Ids = (block_ids[:, None] * units_per_block + np.arange(units_per_block)).ravel()
    return units
