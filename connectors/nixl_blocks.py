"""Whole blocks between engines of equal layout: large runs as they lie, the others, if they are many, by gathering."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np

from pdkv.connectors.nixl_endpoint import NixlEndpoint
from pdkv.connectors.nixl_fetch import GatherReader, Guard, Waiting, Wanted
from pdkv.connectors.nixl_options import NixlOptions
from pdkv.connectors.nixl_wire import RankBlob
from pdkv.connectors.planning import Ids, Run, split_runs
from pdkv.connectors.units import UnitPool

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
        endpoint = self._endpoint
        assert endpoint.pool is not None
        for theirs, ours, sizes in cut_runs(runs, blob.block_bytes):
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
    table = np.asarray(pieces, dtype=np.int64)
    posts = (np.cumsum(table[:, 2]) - 1) // POST_BYTES
    cuts = np.flatnonzero(np.diff(posts)) + 1
    return [(batch[:, 0], batch[:, 1], batch[:, 2]) for batch in np.split(table, cuts)]


def expand_blocks(block_ids: Ids, units_per_block: int) -> Ids:
    """The units of whole blocks."""
    units: Ids = (block_ids[:, None] * units_per_block + np.arange(units_per_block)).ravel()
    return units
