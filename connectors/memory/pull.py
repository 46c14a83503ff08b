"""Pull mode of the `memory` connector: decode reads the blocks that prefill keeps under lease."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdkv.connectors.base import Direction, KVConnectorMetadata, TransferKey
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.memory.base import MemoryMode, MemoryScheduler, MemoryWorker
from pdkv.connectors.memory.fabric import Content, Operation, copy_in, copy_out
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.pull_scheduler import BlockLoad, PullMetadata, PullScheduler
from pdkv.connectors.transfer.planning import as_ids
from pdkv.errors import StaleGeneration, TransferCancelled, TransferError


class MemoryPullScheduler(MemoryScheduler, PullScheduler):
    """Scheduler side of pull."""

    def __init__(self, connector: MemoryMode) -> None:
        MemoryScheduler.__init__(self, connector)
        PullScheduler.__init__(self, connector.config, connector.table, PeerCards(connector.config))

    def source_block_size(self, engine: str, epoch: str) -> int | None:
        return self.block_size if self.epochs.get(engine) == epoch else None


@dataclass(slots=True)
class _Parts:
    """The parts of a load that have begun."""

    under_way: list[BlockLoad]
    more: bool  # others follow
    num_blocks: int  # that have landed


class MemoryPullWorker(MemoryWorker):
    """Worker side of pull: reads land in private blocks and count only if the generations are unchanged."""

    def __init__(self, connector: MemoryMode) -> None:
        super().__init__(connector)
        self._active: dict[TransferKey, _Parts] = {}

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PullMetadata)
        for load in meta.loads:
            if load.continues and load.key not in self._active:
                continue  # an earlier part has failed
            parts = self._active.setdefault(load.key, _Parts([], True, 0))
            parts.under_way.append(load)
            parts.more = load.more
            self.fabric.post(Read(self, load))

    def is_active(self, load: BlockLoad) -> bool:
        """Whether the transfer still waits for this read; data that lands later is refused."""
        parts = self._active.get(load.key)
        return parts is not None and any(each is load for each in parts.under_way)

    def end(self, load: BlockLoad, error: TransferError | None) -> None:
        """End the read."""
        if not self.is_active(load):
            return
        if error is not None:
            self._fail(load.key, error)
            return
        parts = self._active[load.key]
        parts.under_way.remove(load)
        parts.num_blocks += len(load.block_ids)
        if not (parts.under_way or parts.more):
            del self._active[load.key]
            self.received(load.key, parts.num_blocks)

    def stop(self, key: TransferKey, direction: Direction) -> None:
        if key in self._active and direction == "receive":
            self._fail(key, TransferCancelled("cancelled"))

    def _fail(self, key: TransferKey, error: TransferError) -> None:
        del self._active[key]
        self.receive_failed(key, error.code)

    def check_generations(self, table: BlockTable, load: BlockLoad) -> None:
        """Compare generations, read again after the data.

        Raises:
            StaleGeneration: the owner has reused a block.
        """
        for block_id, generation in zip(as_ids(load.source).tolist(), as_ids(load.generations).tolist(), strict=True):
            if table.generation(block_id) != generation:
                raise StaleGeneration(f"block {block_id} was reused")

    def digests_of(self, block_ids: Sequence[int], load: BlockLoad) -> bytes:
        """Digests of a load's tokens in these blocks of this engine."""
        tokens, part = range(load.start, load.stop), self.checksums.pool.whole
        return self.checksums.of(block_ids, load.start, tokens, part, load.key)


class Read(Operation):
    """A read in two stages: the data leaves the source, then it lands."""

    def __init__(self, worker: MemoryPullWorker, load: BlockLoad) -> None:
        self.worker = worker
        self.load = load
        self.content: Content = None
        self.digests = b""

    def deliver(self) -> Operation | None:
        worker, load = self.worker, self.load
        try:
            source = worker.fabric.endpoint(load.engine, load.epoch)
            if self.content is None:
                if isinstance(source, MemoryPullWorker) and worker.checksums.are_wanted(
                    source.config.kv_checksum, load.key.transfer_id
                ):
                    self.digests = source.digests_of(load.source, load)
                self.content = copy_out(source.pool, as_ids(load.source).tolist())
                return self
            if not worker.is_active(load):
                worker.fabric.num_refused += 1
                return None
            copy_in(worker.pool, load.block_ids, self.content)
            worker.check_generations(source.table, load)
            if self.digests:
                own = worker.digests_of(load.block_ids, load)
                worker.checksums.compare(own, self.digests, range(load.start, load.stop), load.key, load.engine)
        except TransferError as error:
            worker.end(load, error)
            return None
        worker.end(load, None)
        return None


class MemoryPullConnector(MemoryMode):
    """The connector in pull mode: decode reads the blocks that prefill keeps under lease."""

    scheduler_type = MemoryPullScheduler
    worker_type = MemoryPullWorker
