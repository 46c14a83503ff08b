"""What the worker sides of both modes have: an endpoint, the pool as units, gathering for peers and from them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pdkv.connectors.nixl.endpoint import NixlEndpoint
from pdkv.connectors.nixl.gather import GatherSource
from pdkv.connectors.nixl.options import NixlOptions
from pdkv.connectors.nixl.reader import PoolReader
from pdkv.connectors.transfer.units import UnitPool
from pdkv.wire.kv import EngineCard

if TYPE_CHECKING:
    import torch


class NixlRank:
    """Opened with the pool; `units`, `source` and `reader` are there from then on."""

    units: UnitPool
    source: GatherSource
    reader: PoolReader

    def __init__(self, endpoint: NixlEndpoint, options: NixlOptions) -> None:
        self.endpoint = endpoint
        self._options = options
        self._peers = endpoint.peers

    def open(
        self,
        kv_cache: "torch.Tensor",
        generations: npt.NDArray[np.int64] | None,
        guard: Callable[[int], AbstractContextManager[None]],
        tick: Callable[[], None],
    ) -> None:
        """Register the pool, and rank 0's generations. Raises ConfigError.

        Args:
            guard: of GatherSource.
            tick: called a few times a second, on the message thread.
        """
        self.endpoint.register(kv_cache, generations)
        self.units = UnitPool(kv_cache)
        self.units.compile_kernels()
        self.source = GatherSource(self.endpoint, self.units, guard)
        self.reader = PoolReader(self.endpoint, self.units, self._options.gate)
        self.endpoint.add_work(self.endpoint.sources.map_ahead)
        self.endpoint.add_tick(tick)

    def update_peers(
        self, added: Sequence[EngineCard], removed: Sequence[EngineCard], change: Callable[[], None]
    ) -> list[str]:
        """Connect to who came and disconnect from who went, soon. `change` updates the cards.

        Returns:
            The agents that are gone.
        """
        ranks = [blob for card in removed for blob in self._peers.ranks_of(card.engine, card.epoch)]
        gone = [blob.agent for blob in ranks]
        change()
        self.endpoint.meet([agent for card in added for agent in self._peers.agents_of(card.engine, card.epoch)])
        if gone:
            self.endpoint.forget(ranks)
            self.endpoint.post(lambda: self.source.forget(gone))
        return gone

    def close(self) -> None:
        """Close the endpoint, and let go of the pool. Idempotent."""
        if "source" in self.__dict__:
            self.source.close()
        self.endpoint.close()
        for name in ("units", "source", "reader"):
            self.__dict__.pop(name, None)
