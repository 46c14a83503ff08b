"""The `memory` connector: engines of one process exchange KV over a MemoryFabric, by pull, push or through a store.

Product code for engines side by side in one process, and the reference implementation of base.py's contracts.
Options: mode (pull, push, store), fabric (name), load (async, layerwise: store only), transfer_timeout_s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from pdkv.connectors.base import (
    ConnectorConfig,
    KVConnector,
    KVConnectorMetadata,
    SchedulerConnector,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
    parse_options,
)
from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.memory.fabric import Content, MemoryFabric, Operation, copy_in, copy_out
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.peer.pull import BlockLoad, PullMetadata, PullScheduler
from pdkv.errors import ConfigError, IncompatiblePeers, StaleGeneration, TransferCancelled, TransferError
from pdkv.wire.messages import ConnectorKind, EngineCard


def _mode(text: str) -> str:
    if text not in ("pull", "push", "store"):
        raise ValueError("expected pull, push or store")
    return text


def _load_mode(text: str) -> str:
    if text not in ("async", "layerwise"):
        raise ValueError("expected async or layerwise")
    return text


class MemoryOptions(msgspec.Struct, frozen=True):
    """--connector-config of the memory connector."""

    mode: str = "pull"
    fabric: str = "default"
    load: str = "async"
    transfer_timeout_s: float = 30.0

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> "MemoryOptions":
        """Raises ConfigError for an unknown option or value."""
        known: dict[str, Callable[[str], Any]] = {
            "mode": _mode, "fabric": str, "load": _load_mode, "transfer_timeout_s": float,
        }  # fmt: skip
        return cls(**parse_options(options, known))


class MemoryConnector(KVConnector):
    """Engines of one process. The option `mode` chooses the subclass."""

    kind: ClassVar[ConnectorKind] = "pull"
    one_process: ClassVar[bool] = True

    def __new__(cls, config: ConnectorConfig, notify: Callable[[], None]) -> "MemoryConnector":
        """A connector's kind is its class's: each mode is a subclass."""
        return super().__new__(cls.for_options(config.options))

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        super().__init__(config, notify)
        if config.tp > 1:
            raise ConfigError(f"connector memory serves engines of one rank, this one has {config.tp}")
        self.options = MemoryOptions.parse(config.options)
        self.fabric = MemoryFabric.named(self.options.fabric)
        self._table = super().make_block_table()

    @classmethod
    def for_options(cls, options: Mapping[str, str]) -> "type[MemoryConnector]":
        return memory_modes()[MemoryOptions.parse(options).mode] if cls is MemoryConnector else cls

    def make_block_table(self) -> BlockTable:
        return self._table

    def make_scheduler_side(self) -> SchedulerConnector:
        return MemoryPullScheduler(self)

    def make_worker_side(self, rank: int) -> WorkerConnector:
        if rank:
            raise ConfigError(f"the memory connector serves engines of one rank, got rank {rank}")
        return MemoryPullWorker(self)


def memory_modes() -> dict[str, type[MemoryConnector]]:
    """The connector class of each mode."""
    from pdkv.connectors.memory.push import MemoryPushConnector
    from pdkv.connectors.memory.store import MemoryStoreConnector

    return {"pull": MemoryPullConnector, "push": MemoryPushConnector, "store": MemoryStoreConnector}


class MemoryPullConnector(MemoryConnector):
    """Decode reads the blocks that prefill keeps under lease."""

    kind: ClassVar[ConnectorKind] = "pull"


# --- what all modes share -----------------------------------------------------------------------------------------


class MemoryScheduler(SchedulerConnector):
    """Scheduler side: who the peers are, and whether their layout is ours."""

    def __init__(self, connector: MemoryConnector) -> None:
        self.config = connector.config
        self.options = connector.options
        self.fabric = connector.fabric
        self.block_size = connector.config.layout.block_size
        self.epochs: dict[str, str] = {}  # engine -> epoch

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """Raises IncompatiblePeers where a peer's layout differs; this connector reshards nothing."""
        for card in cards:
            if card.layout != self.config.layout:
                raise IncompatiblePeers(
                    f"{self.config.engine} has {self.config.layout}, its peer {card.engine} has {card.layout}"
                )
        self.epochs = {card.engine: card.epoch for card in cards}

    @property
    def has_pending_work(self) -> bool:
        return bool(self.fabric.under_way) and not self.fabric.manual


class MemoryWorker(WorkerConnector):
    """Worker side: an endpoint of the fabric, and the results not yet reported."""

    def __init__(self, connector: MemoryConnector) -> None:
        self.engine = connector.config.engine
        self.epoch = connector.config.epoch
        self.fabric = connector.fabric
        self.options = connector.options
        self.notify = connector.notify
        self.table = connector.make_block_table()
        self.block_size = connector.config.layout.block_size
        self.pool: Content = None
        self._block_bytes = connector.config.layout.block_bytes
        self._results: tuple[dict[TransferKey, TransferOutcome], ...] = ({}, {}, {}, {})

    def register_kv_caches(self, kv_cache: Content) -> None:
        self.pool = kv_cache
        self.fabric.register(self)

    def get_finished(self) -> TransferResults:
        self.fabric.pump()
        results, self._results = self._results, ({}, {}, {}, {})
        return TransferResults(*results)

    def sent(self, key: TransferKey, num_blocks: int) -> None:
        """Everything of the transfer was delivered."""
        self._report(0, key, TransferOutcome(num_bytes=num_blocks * self._block_bytes))

    def send_failed(self, key: TransferKey, code: str) -> None:
        """The transfer ended without delivery, and nothing reads its blocks any more."""
        self._report(1, key, TransferOutcome(code))

    def received(self, key: TransferKey, num_blocks: int) -> None:
        """All blocks are in and checked."""
        self._report(2, key, TransferOutcome(num_bytes=num_blocks * self._block_bytes))

    def receive_failed(self, key: TransferKey, code: str, num_tokens: int = 0, num_damaged: int = 0) -> None:
        """The transfer ended, and nothing writes its blocks any more; `num_tokens` of its first tokens are in them."""
        self._report(3, key, TransferOutcome(code, num_tokens=num_tokens, num_damaged=num_damaged))

    def _report(self, which: int, key: TransferKey, outcome: TransferOutcome) -> None:
        """Results come while another engine runs its step, too."""
        self._results[which][key] = outcome
        self.notify()

    def shutdown(self) -> None:
        self.fabric.unregister(self)


# --- pull ---------------------------------------------------------------------------------------------------------


class MemoryPullScheduler(MemoryScheduler, PullScheduler):
    """Scheduler side of pull."""

    def __init__(self, connector: MemoryConnector) -> None:
        MemoryScheduler.__init__(self, connector)
        PullScheduler.__init__(self, connector.config, connector.make_block_table(), PeerCards(connector.config))

    def source_block_size(self, engine: str, epoch: str) -> int | None:
        return self.block_size if self.epochs.get(engine) == epoch else None


class MemoryPullWorker(MemoryWorker):
    """Worker side of pull: reads land in private blocks and count only if the generations stayed."""

    def __init__(self, connector: MemoryConnector) -> None:
        super().__init__(connector)
        self._active: dict[TransferKey, BlockLoad] = {}

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, PullMetadata)
        for load in meta.loads:
            self._active[load.key] = load
            self.fabric.post(Read(self, load))

    def cancel(self, key: TransferKey) -> None:
        self.fabric.post(CancelRead(self, key))

    def is_active(self, load: BlockLoad) -> bool:
        """Whether the transfer still waits for this read; what lands later is refused."""
        return self._active.get(load.key) is load

    def end(self, load: BlockLoad, error: TransferError | None) -> None:
        """The read is over."""
        if self._active.get(load.key) is load:
            del self._active[load.key]
            if error is None:
                self.received(load.key, len(load.block_ids))
            else:
                self.receive_failed(load.key, error.code)

    def cancel_active(self, key: TransferKey) -> None:
        """Nothing of this transfer lands from now on."""
        load = self._active.get(key)
        if load is not None:
            self.end(load, TransferCancelled("cancelled"))

    def check_generations(self, table: BlockTable, load: BlockLoad) -> None:
        """Re-read after the data.

        Raises:
            StaleGeneration: the owner reused a block meanwhile.
        """
        for block_id, generation in zip(load.source, load.generations, strict=True):
            if table.generation(block_id) != generation:
                raise StaleGeneration(f"block {block_id} was reused")


class Read(Operation):
    """Two stages: the data leaves the source, the data lands."""

    def __init__(self, worker: MemoryPullWorker, load: BlockLoad) -> None:
        self.worker = worker
        self.load = load
        self.content: Content = None

    def deliver(self) -> Operation | None:
        worker, load = self.worker, self.load
        try:
            source = worker.fabric.endpoint(load.engine, load.epoch)
            if self.content is None:
                self.content = copy_out(source.pool, load.source)
                return self
            if not worker.is_active(load):
                worker.fabric.num_refused += 1
                return None
            copy_in(worker.pool, load.block_ids, self.content)
            worker.check_generations(source.table, load)
        except TransferError as error:
            worker.end(load, error)
            return None
        worker.end(load, None)
        return None


class CancelRead(Operation):
    """The confirmation of a cancel."""

    def __init__(self, worker: MemoryPullWorker, key: TransferKey) -> None:
        self.worker = worker
        self.key = key

    def deliver(self) -> Operation | None:
        self.worker.cancel_active(self.key)
        return None
