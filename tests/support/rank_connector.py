"""A connector for engines of several ranks that moves nothing: its worker sides do what their options say.

As "rank_connector:RankConnector" it can be named in a configuration. Each step's metadata carries a text in a field of
its own type, which every worker side writes down; a transfer that a rank was told to report is reported once.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pdkv.connectors.base import (
    NO_TRANSFERS,
    Built,
    ConnectorConfig,
    KVConnector,
    KVConnectorMetadata,
    SchedulerConnector,
    SchedulerView,
    Stats,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.plan import CARRIED, INTERFACE, ConnectorPlan
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats

if TYPE_CHECKING:
    import torch


class Note(KVConnectorMetadata, kw_only=True):
    """Metadata with a field that the base class lacks."""

    text: str


class Notes(SchedulerConnector):
    """Numbers the steps."""

    def build_connector_meta(self, view: SchedulerView) -> Note:
        return Note(step_id=view.step_id, text=f"step {view.step_id}")


class RankWorker(WorkerConnector):
    """Writes down what it is told."""

    metadata_type = Note

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        self.config, self.notify = config, notify
        self.notes: list[str] = []
        self.peers: list[str] = []
        self.to_report = NO_TRANSFERS
        self.num_reported = 0
        self.error: Exception | None = None  # raised in the next step
        self.stopped = threading.Event()  # the next step waits for it where `hangs`
        self.hangs = False

    def register_kv_caches(self, kv_cache: "torch.Tensor") -> None:
        self.kv_pool = kv_cache

    def handshake(self) -> bytes:
        return f"{self.config.rank} of {self.config.tp}, {self.config.kv_shards} shards".encode()

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        assert isinstance(meta, Note), meta
        self.notes.append(meta.text)
        if self.error is not None:
            raise self.error
        if self.hangs:
            self.stopped.wait(30)

    def get_finished(self) -> TransferResults:
        results, self.to_report = self.to_report, NO_TRANSFERS
        return results

    def get_stats(self) -> Stats:
        return {"": ConnectorStats(saves=self.num_reported), "part": ConnectorStats(loads=self.config.rank)}

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        self.peers = [card.engine for card in added]

    def report(self, key: tuple[str, int], num_bytes: int) -> None:
        """With the next step: the transfer was sent."""
        self.num_reported += 1
        self.to_report = NO_TRANSFERS._replace(finished_sending={key: TransferOutcome("", num_bytes)})


class RankConnector(KVConnector):
    """Found by (engine, rank) in `made`, for tests whose ranks are threads."""

    declares = ConnectorPlan(interface=INTERFACE, kind="store", layouts=CARRIED)
    made: ClassVar[dict[tuple[str, int], RankWorker]] = {}

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        worker = cls.made[config.engine, config.rank] = RankWorker(config, notify)
        return Built(Notes, lambda: worker)
