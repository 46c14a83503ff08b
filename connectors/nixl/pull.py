"""Pull over NIXL: decode reads leased blocks, then the generations; small or differently cut pieces are gathered."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pdkv.connectors.base import ConnectorConfig, KVConnectorMetadata
from pdkv.connectors.block_table import LocalBlockTable
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.fetch import Wanted
from pdkv.connectors.nixl.gather import no_offer
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.worker import NixlWorker
from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.peer.pull_worker import Landed, PullPiece, PullWorker
from pdkv.connectors.peer.source_digests import SourceDigests
from pdkv.connectors.step_done import ON_HOST
from pdkv.connectors.transfer.digest import Tokens
from pdkv.connectors.transfer.digest_table import DigestRows
from pdkv.connectors.transfer.lanes import DEVICE_THREADS
from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.connectors.transfer.worker import Job
from pdkv.errors import KVNotFound

if TYPE_CHECKING:
    import torch


class NixlPullWorker(NixlWorker, PullWorker):
    """Worker side of mode=pull."""

    carries_digests = True

    def __init__(
        self,
        config: ConnectorConfig,
        notify: Callable[[], None],
        endpoint: NixlEndpoint,
        options: NixlOptions,
        table: LocalBlockTable,
    ) -> None:
        super().__init__(config, notify, endpoint, options)
        self._table = table

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        """Register the pool with NIXL. Raises ConfigError."""
        on_device = kv_cache.device.type != "cpu"
        self.lanes_per_rank = self._options.threads_per_peer or (DEVICE_THREADS if on_device else 1)
        self.open(kv_cache, self._table.values if self.config.rank == 0 else None, no_offer)
        self.checksums = Checksums(self.config, kv_cache)
        if self.config.kv_checksum != "off":
            self.source_digests = SourceDigests(self.checksums.pool, self.endpoint.register_digests())
        self.endpoint.start()
        self.start_threads()

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        super().start_load_kv(meta)
        self.source.after = meta.earlier_steps or ON_HOST

    def read(self, job: Job, piece: PullPiece, scratch: Any) -> int:
        load, layout, peer = piece.load, self.config.layout, piece.card.layout
        blob = self._ranks.rank(load.engine, load.epoch, piece.heads.peer_rank)
        if load.unit != peer.block_size:
            raise KVNotFound(f"engine {load.engine} can only be read by whole blocks")
        if layout == peer and load.start % layout.block_size == 0:
            return self.reader.read_blocks(job, blob, as_ids(load.source), as_ids(load.block_ids))
        wanted = Wanted(piece.source_units(), piece.heads.peer_first, piece.own_units(layout), piece.own_part(layout))
        return self.reader.read_units(job, blob, wanted)

    def read_digested(self, job: Job, piece: PullPiece, scratch: Any, tokens: Tokens) -> Landed:
        """As in the base class; used if the peer's pool is mapped: one pass."""
        source = self.endpoint.sources.source(self._ranks.rank(*piece.peer_rank))
        if source is None:
            return super().read_digested(job, piece, scratch, tokens)
        source.is_source = True
        return self.copy_digested(job, piece, source.data, tokens)

    def read_digests(self, job: Job, piece: PullPiece, scratch: Any, units: Ids, generations: Ids) -> DigestRows:
        blob = self._ranks.rank(*piece.peer_rank)
        return self.reader.digests(job, blob, units, generations)

    def generations(self, job: Job, piece: PullPiece, blocks: Ids, scratch: Any) -> Ids:
        """The generations in rank 0's table."""
        return self.reader.generations(job, self._ranks.rank(piece.load.engine, piece.load.epoch, 0), blocks)
