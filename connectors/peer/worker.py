"""The worker side of transports between two engines: knows the peers, and has a lane for each of their ranks."""

from collections.abc import Callable, Sequence
from itertools import count

from pdkv.connectors.base import ConnectorConfig
from pdkv.connectors.peer.cards import PeerCards
from pdkv.connectors.transfer.lanes import Lane, LaneConfig
from pdkv.connectors.transfer.worker import TransferWorker
from pdkv.wire.kv import EngineCard


class PeerWorker(TransferWorker):
    """Base class of the worker sides that know their peers."""

    def __init__(
        self,
        config: ConnectorConfig,
        notify: Callable[[], None],
        peers: PeerCards,
        *,
        timeout_s: float,
        lanes: LaneConfig,
    ) -> None:
        super().__init__(notify, timeout_s=timeout_s, lanes=lanes, clock=config.clock)
        self.config = config
        self.lanes_per_rank = 1
        self._load_numbers = count()
        self.peers = peers

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        for card in removed:
            self.peers.remove(card.engine, card.epoch)
        for card in added:
            self.peers.add(card)
        numbers = range(self.lanes_per_rank)
        self.lanes.retire(
            {self.lane_of(c.engine, c.epoch, rank, i) for c in removed for rank in range(c.tp) for i in numbers}
        )

    def shutdown(self) -> None:
        super().shutdown()
        self.peers.clear()

    def lane_of(self, engine: str, epoch: str, peer_rank: int, number: int = 0) -> Lane:
        """A lane of a peer's rank: by default a rank has `lanes_per_rank` lanes, among which `number` chooses."""
        return (engine, epoch, peer_rank, number % self.lanes_per_rank)
