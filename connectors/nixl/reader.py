"""Copies blocks or units from a peer's pool into this rank's, by the available path, then reads the generations or
permits that validate them.
"""

from contextlib import nullcontext

import numpy as np

from pdkv.connectors.arena.arena import PeerArena
from pdkv.connectors.nixl.blocks import DEVICE_POST_BYTES, POST_BYTES, are_gathered, cut_pieces, expand_blocks
from pdkv.connectors.nixl.endpoint import NixlEndpoint, Waiting
from pdkv.connectors.nixl.fetch import GatherReader, Guard, Wanted
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.wire import RankBlob
from pdkv.connectors.transfer.digest import PoolDigests, Tokens
from pdkv.connectors.transfer.digest_table import DigestRows, rows_of
from pdkv.connectors.transfer.planning import Ids, run_starts
from pdkv.connectors.transfer.pool_copy import COPY_BYTES, Pieces, block_pieces, copy_pieces, unit_pieces
from pdkv.connectors.transfer.units import UnitPool
from pdkv.errors import KVNotFound
from pdkv.kernels.digest import Digests


class PoolReader:
    """The reader of one rank. Thread-safe."""

    def __init__(self, endpoint: NixlEndpoint, units: UnitPool, options: NixlOptions) -> None:
        self.gathered = GatherReader(endpoint, units)
        self._endpoint = endpoint
        self._units = units
        self._options = options

    def read_blocks(
        self,
        job: Waiting,
        blob: RankBlob,
        theirs: Ids,
        ours: Ids,
        layers: range | None = None,
        *,
        offer: int = 0,
        guard: Guard = nullcontext,
    ) -> int:
        """Read some layers (None: all) of blocks theirs[i] into ours[i]; both ranks have one layout.

        Args:
            offer: the peer's number of the offer, in a push.
            guard: a context around each write into the own pool.

        Returns:
            The bytes.

        Raises:
            PdkvError: the peer refuses or is gone, no path leads there, or the job must stop.
        """
        layout = self._endpoint.config.layout
        layers = range(layout.num_layers) if layers is None else layers
        source = self._endpoint.sources.source(blob)
        if source is None:
            return self._read_by_nixl(job, blob, theirs, ours, layers, offer, guard)
        return self._copy(job, source, block_pieces(layout, theirs, ours, layers), guard)

    def read_units(self, job: Waiting, blob: RankBlob, wanted: Wanted) -> int:
        """As `read_blocks`, for a peer's units, whatever its number of ranks and its block size."""
        source = self._endpoint.sources.source(blob)
        if source is None:
            return self.gathered.fetch(job, blob, wanted)
        own, peer = self._endpoint.config.layout, self._endpoint.peers.card_of(blob).layout
        pieces = unit_pieces(own, peer, wanted.theirs, wanted.head_start, wanted.ours, wanted.part)
        return self._copy(job, source, pieces, wanted.guard)

    def read_digested(
        self, job: Waiting, blob: RankBlob, wanted: Wanted, own: PoolDigests, tokens: Tokens
    ) -> Digests | None:
        """As `read_units`, with digests of the wanted own units made on the way, for all heads.

        Args:
            wanted: as many units of both pools as there are `tokens`.
            tokens: in the order of the own units.

        Returns:
            None: the peer's pool is not mapped. Nothing has been read.
        """
        source = self._endpoint.sources.source(blob)
        if source is None or own.flat is None or tokens.skipped.any():
            return None
        layout, peer = self._endpoint.config.layout, self._endpoint.peers.card_of(blob).layout
        pieces = unit_pieces(layout, peer, wanted.theirs, wanted.head_start, wanted.ours, wanted.part)
        source.is_source = True
        return own.copy(tokens, wanted.part, source.data.reshape(-1), pieces, job.check, wanted.guard)

    def generations(self, job: Waiting, blob: RankBlob, blocks: Ids) -> Ids:
        """The current generations of a peer's blocks; `blob` is its rank 0's. Raises the same as `read_blocks`."""
        source = self._endpoint.sources.source(blob)
        if source is not None:
            return source.table.generations(blocks)
        if blob.generations is None:
            raise KVNotFound(f"agent {blob.agent} publishes no generations")
        first, stop = int(blocks.min()), int(blocks.max()) + 1
        words = self._endpoint.read_words(job, blob, blob.generations, first, stop - first)
        return words[blocks - first]

    def digests(self, job: Waiting, blob: RankBlob, units: Ids, generations: Ids) -> DigestRows:
        """The digests in a peer's table for its hash blocks in these generations. Raises the same as `read_blocks`."""
        source = self._endpoint.sources.source(blob)
        if source is not None:
            return source.digests.read(units, generations)
        if blob.digests is None:
            raise KVNotFound(f"agent {blob.agent} publishes no digests")
        width = 1 + self._endpoint.peers.card_of(blob).layout.num_kv_heads
        first, stop = int(units.min()), int(units.max()) + 1
        words = self._endpoint.read_words(job, blob, blob.digests, first * width, (stop - first) * width)
        return rows_of(words.reshape(-1, width)[units - first], generations)

    def word(self, job: Waiting, blob: RankBlob, number: int) -> int:
        """The current value of a word that a peer publishes: one of its permits. Raises the same as `read_blocks`."""
        source = self._endpoint.sources.source(blob)
        if source is not None:
            return source.word(number)
        (word,) = self._endpoint.read_words(job, blob, blob.permits, number, 1)
        return int(word)

    def _read_by_nixl(
        self, job: Waiting, blob: RankBlob, theirs: Ids, ours: Ids, layers: range, offer: int, guard: Guard
    ) -> int:
        """Read large runs of blocks directly, and the others, if there are many, by gathering.

        Reads that may land late are all gathered, so that they land in buffers that are not reused after a failure, and
        not in the pool.
        """
        endpoint, units, block_bytes = self._endpoint, self._units, blob.block_bytes
        layer_bytes = block_bytes // units.num_layers
        whole = len(layers) == units.num_layers
        starts = run_starts(theirs, ours) if whole else np.arange(theirs.size)
        counts = np.diff(starts, append=theirs.size)
        first, sizes = layers.start * layer_bytes, (counts - 1) * block_bytes + len(layers) * layer_bytes
        table = np.stack([theirs[starts] * block_bytes + first, ours[starts] * block_bytes + first, sizes], axis=1)
        small = are_gathered(sizes, self._options.gather_below, self._options.gather_min_pieces)
        small |= endpoint.may_land_late
        pool = endpoint.pool
        assert pool is not None
        limit = POST_BYTES if pool.kind == "DRAM" else DEVICE_POST_BYTES
        for at_source, here, num_bytes in cut_pieces(table[~small], limit):
            job.check()
            with guard():
                endpoint.read(job, blob, (pool, here), (blob.pool, at_source), num_bytes)
        if small.any():
            rest = np.repeat(small, counts)
            ids = [expand_blocks(blocks[rest], units.units_per_block) for blocks in (theirs, ours)]
            part = units.whole._replace(layer_start=layers.start, layer_stop=layers.stop)
            self.gathered.fetch(job, blob, Wanted(ids[0], 0, ids[1], part, offer, guard))
        return int(theirs.size) * len(layers) * layer_bytes

    def _copy(self, job: Waiting, source: PeerArena, pieces: Pieces, guard: Guard) -> int:
        pool = self._units.flat
        assert pool is not None, "pools on a device must be read by NIXL"
        source.is_source = True
        for part in pieces.cut(COPY_BYTES):
            job.check()
            with guard():
                copy_pieces(pool, source.data.reshape(-1), part)
        return pieces.num_bytes
