"""The `p2p` connector: prefill ranks push KV to decode ranks over links of two, made on demand.

A link is one or two sockets, unix within a host and TCP between hosts; between distinct GPUs KV goes over NCCL. Peers
find each other by the addresses in their cards.
"""

from collections.abc import Callable
from typing import ClassVar

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import ConnectorConfig, KVConnector, KVConnectorMetadata, SchedulerConnector, WorkerConnector
from pdkv.connectors.p2p.options import P2POptions, P2PPeers
from pdkv.connectors.p2p.wire import FRAMES_VERSION
from pdkv.connectors.p2p.worker import P2PWorker
from pdkv.connectors.peer.push_scheduler import PushMetadata, PushScheduler
from pdkv.connectors.plan import INTERFACE, PUSH_ORDERS, ConnectorPlan
from pdkv.errors import ConfigError


class P2PConnector(KVConnector):
    """One rank's end of all links."""

    declares = ConnectorPlan(
        interface=INTERFACE, kind="push", orders=(*PUSH_ORDERS, "concurrent"), lends=True,
        layouts=("heads", "windows"), wire_version=FRAMES_VERSION,
    )  # fmt: skip
    metadata_type: ClassVar[type[KVConnectorMetadata]] = PushMetadata
    options_type = P2POptions
    options: P2POptions

    def __init__(self, config: ConnectorConfig, notify: Callable[[], None]) -> None:
        """Raises ConfigError for wrong options or block sizes."""
        super().__init__(config, notify)
        if config.layout.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(f"block_size must be a multiple of {HASH_BLOCK_SIZE}, got {config.layout.block_size}")
        self._peers = P2PPeers(config)  # of both sides

    def make_scheduler_side(self) -> SchedulerConnector:
        return PushScheduler(self.config, self._peers)

    def make_worker_side(self, rank: int) -> WorkerConnector:
        """This process' rank's side; `rank` is the one that the connector was built for."""
        assert rank == self.config.rank, "a connector is built for one rank"
        return P2PWorker(self.config, self.notify, self.options, self._peers)
