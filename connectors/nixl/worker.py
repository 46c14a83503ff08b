"""What the worker sides of both modes have in common, above a pull or a push: an endpoint, the pool as units, gathering
for peers and from them.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pdkv.connectors.base import ConnectorConfig, Stats
from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.gather import GatherSource
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.reader import PoolReader
from pdkv.connectors.peer.push_worker import PushWorker
from pdkv.connectors.peer.worker import PeerWorker
from pdkv.connectors.stats import sum_stats
from pdkv.connectors.transfer.lanes import Lane
from pdkv.connectors.transfer.units import UnitPool
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats

if TYPE_CHECKING:
    import torch


class NixlWorker(PeerWorker):
    """Comes before PullWorker or PushWorker among a worker side's base classes.

    `units`, `source` and `reader` exist from `open` to `shutdown`.
    """

    units: UnitPool
    source: GatherSource
    reader: PoolReader

    def __init__(
        self, config: ConnectorConfig, notify: Callable[[], None], endpoint: NixlEndpoint, options: NixlOptions
    ) -> None:
        super().__init__(config, notify, endpoint.peers, timeout_s=options.transfer_timeout_s, lanes=options.lanes)
        self.endpoint = endpoint
        self._ranks = endpoint.peers
        self._options = options

    def open(
        self,
        kv_cache: "torch.Tensor",
        generations: npt.NDArray[np.int64] | None,
        guard: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Register the pool, and rank 0's generations. Raises ConfigError.

        Args:
            guard: of GatherSource.
        """
        self.endpoint.register(kv_cache, generations)
        self.units = UnitPool(kv_cache)
        self.units.compile_kernels()
        self.source = GatherSource(self.endpoint, self.units, guard)
        self.reader = PoolReader(self.endpoint, self.units, self._options)
        self.endpoint.add_work(self.endpoint.sources.map_ahead)
        self.endpoint.add_tick(self.wake_if_late)

    def make_scratch(self, lane: Lane) -> Any:
        self.endpoint.use_device()

    def handshake(self) -> bytes:
        return self.endpoint.blob()

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Connect to added peers and disconnect from removed ones, soon."""
        ranks = [blob for card in removed for blob in self._ranks.ranks_of(card.engine, card.epoch)]
        gone = [blob.agent for blob in ranks]
        super().update_peers(added, removed)
        self.endpoint.meet([agent for card in added for agent in self._ranks.agents_of(card.engine, card.epoch)])
        if gone:
            self.endpoint.forget(ranks)
            self.endpoint.post(lambda: self.source.forget(gone))
        self.forget_agents(gone)

    def get_stats(self) -> Stats:
        """The counts, with the paths to known peers."""
        paths = self.endpoint.sources.in_use()
        return sum_stats([super().get_stats(), *({"": ConnectorStats(paths={peer: path})} for peer, path in paths)])

    def forget_agents(self, agents: Sequence[str]) -> None:
        """Forget these peers, which are gone."""

    def shutdown(self) -> None:
        super().shutdown()
        self.stop_receiving()
        if "source" in self.__dict__:
            self.source.close()
        self.endpoint.close()
        for name in ("units", "source", "reader"):  # lets go of the pool
            self.__dict__.pop(name, None)

    def stop_receiving(self) -> None:
        """Called when all jobs have been stopped, before the endpoint closes."""


class NixlPush(NixlWorker, PushWorker):
    """The worker as seen by both sides of a push."""
