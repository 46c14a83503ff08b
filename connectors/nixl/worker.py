"""What the worker sides of both modes have in common, above a pull or a push: their rank's end of NIXL."""

from collections.abc import Callable, Sequence
from typing import Any

from pdkv.connectors.base import ConnectorConfig, Stats
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.rank import NixlRank
from pdkv.connectors.peer.worker import PeerWorker
from pdkv.connectors.stats import sum_stats
from pdkv.connectors.transfer.lanes import Lane
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats


class NixlWorker(PeerWorker):
    """Comes before PullWorker or PushWorker among a worker side's base classes."""

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], endpoint: NixlEndpoint, options: NixlOptions
    ) -> None:
        super().__init__(config, notify, endpoint.peers, timeout_s=options.transfer_timeout_s, lanes=options.lanes)
        self.rank = NixlRank(endpoint, options)
        self._ranks = endpoint.peers
        self._options = options

    def make_scratch(self, lane: Lane) -> Any:
        self.rank.endpoint.use_device()

    def handshake(self) -> bytes:
        return self.rank.endpoint.blob()

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        update = super().update_peers
        self.forget_agents(self.rank.update_peers(added, removed, lambda: update(added, removed)))

    def get_stats(self) -> Stats:
        """With the paths to the peers that have been met."""
        paths = self.rank.endpoint.sources.in_use()
        return sum_stats([super().get_stats(), *({"": ConnectorStats(paths={peer: path})} for peer, path in paths)])

    def forget_agents(self, agents: Sequence[str]) -> None:
        """These peers are gone."""

    def shutdown(self) -> None:
        super().shutdown()
        self.stop_receiving()
        self.rank.close()

    def stop_receiving(self) -> None:
        """All jobs have been stopped, and the endpoint is about to close."""
