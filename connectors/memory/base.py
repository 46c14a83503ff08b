"""Shared parts of pull and push in the `memory` connector: options, the fabric, peers, and reporting results."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Literal

from pdkv.base.options import Options, Seconds, option
from pdkv.connectors.base import (
    Built,
    ConnectorConfig,
    Direction,
    KVConnector,
    SchedulerConnector,
    Stats,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.connectors.memory.fabric import Content, MemoryFabric, Operation
from pdkv.connectors.peer.checksums import Checksums
from pdkv.connectors.plan import CARRIED, INTERFACE, ConnectorPlan
from pdkv.connectors.stats import stats_of_transfer
from pdkv.errors import IncompatiblePeers
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats


class MemoryOptions(Options):
    """--connector-config of the memory connector, in every mode."""

    mode: Literal["pull", "push", "store"] = option("pull", "how KV is transferred; mode=store has further options")
    fabric: str = option("default", "engines with the same name exchange KV")


class MemoryPeerOptions(MemoryOptions):
    """--connector-config of pull and push."""

    transfer_timeout_s: Seconds = option(30.0, "deadline of one transfer, in seconds")


class MemoryMode(KVConnector):
    """Pull or push between single-rank engines in one process."""

    declares = ConnectorPlan(interface=INTERFACE, kind="pull", lends=True, one_process=True, layouts=CARRIED)
    options_type: ClassVar[type[MemoryPeerOptions]] = MemoryPeerOptions
    scheduler_type: ClassVar[type["MemoryScheduler"]]
    worker_type: ClassVar[type["MemoryWorker"]]

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        self.config, self.notify = config, notify
        self.options = self.options_type.parse(config.plan.options)
        self.fabric = MemoryFabric.named(self.options.fabric)
        self.table = LocalBlockTable(config.num_blocks)

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        shared = cls(config, notify)
        return Built(partial(cls.scheduler_type, shared), partial(cls.worker_type, shared), shared.table)


class MemoryScheduler(SchedulerConnector):
    """Scheduler side: knows the peers, and checks that their layout is the same."""

    def __init__(self, connector: MemoryMode) -> None:
        self.config = connector.config
        self.options = connector.options
        self.fabric = connector.fabric
        self.block_size = connector.config.layout.block_size
        self.epochs: dict[str, str] = {}  # engine -> epoch

    def update_peers(self, cards: Sequence[EngineCard]) -> None:
        """Set the peers. Raises IncompatiblePeers if a peer's layout differs; this connector does not reshard."""
        for card in cards:
            if card.layout != self.config.layout:
                raise IncompatiblePeers(
                    f"{self.config.engine} has {self.config.layout}, but its peer {card.engine} has {card.layout}"
                )
        self.epochs = {card.engine: card.epoch for card in cards}


class MemoryWorker(WorkerConnector):
    """Worker side: an endpoint of the fabric, and the results not yet reported."""

    checksums: Checksums

    def __init__(self, connector: MemoryMode) -> None:
        self.config = connector.config
        self.engine = connector.config.engine
        self.epoch = connector.config.epoch
        self.fabric = connector.fabric
        self.options = connector.options
        self.notify = connector.notify
        self.table: BlockTable = connector.table
        self.block_size = connector.config.layout.block_size
        self.pool: Content = None
        self._block_bytes = connector.config.layout.block_bytes
        self._results: tuple[dict[TransferKey, TransferOutcome], ...] = ({}, {}, {}, {})
        self._stats = ConnectorStats()

    def register_kv_caches(self, kv_cache: Content) -> None:
        self.pool = kv_cache
        self.checksums = Checksums(self.config, kv_cache)
        self.fabric.register(self)

    def get_finished(self) -> TransferResults:
        self.fabric.pump()
        results, self._results = self._results, ({}, {}, {}, {})
        return TransferResults(*results)

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        self.fabric.post(Stop(self, key, direction))

    @abstractmethod
    def stop(self, key: TransferKey, direction: Direction) -> None:
        """End this transfer: from now on none of its data is written or read."""

    def get_stats(self) -> Stats:
        return {"": self._stats}

    def sent(self, key: TransferKey, num_blocks: int) -> None:
        """Report that everything of the transfer was delivered."""
        self._report(0, key, TransferOutcome(num_bytes=num_blocks * self._block_bytes))

    def send_failed(self, key: TransferKey, code: str) -> None:
        """Report that the transfer ended without delivery, and nothing reads its blocks any more."""
        self._report(1, key, TransferOutcome(code))

    def received(self, key: TransferKey, num_blocks: int) -> None:
        """Report that all blocks have arrived and been checked."""
        self._report(2, key, TransferOutcome(num_bytes=num_blocks * self._block_bytes))

    def receive_failed(self, key: TransferKey, code: str, num_tokens: int = 0, num_damaged: int = 0) -> None:
        """Report that the transfer ended, and nothing writes its blocks any more; its first `num_tokens` tokens have
        arrived.
        """
        self._report(3, key, TransferOutcome(code, num_tokens=num_tokens, num_damaged=num_damaged))

    def _report(self, which: int, key: TransferKey, outcome: TransferOutcome) -> None:
        """Report a result, which may come while another engine runs its step."""
        self._results[which][key] = outcome
        self._stats += stats_of_transfer("send" if which < 2 else "receive", outcome)
        self.notify()

    def shutdown(self) -> None:
        self.fabric.unregister(self)


class Stop(Operation):
    """Confirms a cancel on the side that asked for it."""

    def __init__(self, worker: MemoryWorker, key: TransferKey, direction: Direction) -> None:
        self.worker = worker
        self.key = key
        self.direction = direction

    def deliver(self) -> Operation | None:
        self.worker.stop(self.key, self.direction)
        return None
