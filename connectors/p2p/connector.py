"""The `p2p` connector: prefill ranks push KV to decode ranks over links between two ranks, made on demand.

A link is one or two sockets, unix within a host and TCP between hosts; between distinct GPUs KV goes over NCCL. Peers
find each other by the addresses in their cards.
"""

from collections.abc import Callable

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import Built, ConnectorConfig, KVConnector
from pdkv.connectors.p2p.options import P2POptions, P2PPeers
from pdkv.connectors.p2p.wire import FRAMES_VERSION
from pdkv.connectors.p2p.worker import P2PWorker
from pdkv.connectors.peer.push_scheduler import PushScheduler
from pdkv.connectors.plan import CARRIED, INTERFACE, PUSH_ORDERS, ConnectorPlan
from pdkv.errors import ConfigError


class P2PConnector(KVConnector):
    """One rank's end of all links."""

    declares = ConnectorPlan(
        interface=INTERFACE, kind="push", orders=(*PUSH_ORDERS, "concurrent"), lends=True,
        layouts=CARRIED, wire_version=FRAMES_VERSION,
    )  # fmt: skip
    options_type = P2POptions

    @classmethod
    def build(cls, config: ConnectorConfig, notify: Callable[[], None]) -> Built:
        if config.layout.block_size % HASH_BLOCK_SIZE:
            raise ConfigError(f"block_size must be a multiple of {HASH_BLOCK_SIZE}, got {config.layout.block_size}")
        options, peers = P2POptions.parse(config.plan.options), P2PPeers(config)
        return Built(lambda: PushScheduler(config, peers), lambda: P2PWorker(config, notify, options, peers))
