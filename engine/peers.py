"""The other engines, as the routers report them."""

import logging
from collections.abc import Sequence

from pdkv.connectors.base import SchedulerConnector
from pdkv.engine.reports import Counters
from pdkv.engine.worker.executor import Executor
from pdkv.engine.worker.step_queue import StepQueue
from pdkv.wire.kv import EngineCard

logger = logging.getLogger(__name__)


class PeerTable:
    """The known engines: both sides of the connector are told of every change."""

    def __init__(
        self, card: EngineCard, connector: SchedulerConnector | None, workers: Executor | StepQueue, counters: Counters
    ) -> None:
        self.workers = workers
        self.counters = counters
        self._engine = card.engine
        self._connector = connector
        self._cards: dict[str, dict[str, EngineCard]] = {}  # by router, the latest speaker last, and name
        self._peers: dict[str, EngineCard] = {}  # by epoch

    def router_left(self, router_id: str) -> None:
        """Drop the engines that only that router knew."""
        if self._cards.pop(router_id, None) is not None:
            try:
                self._update()
            except Exception as error:  # another router's card is refused
                self.refused((), (), error)

    def take_cards(self, router_id: str, cards: Sequence[EngineCard], removed: Sequence[str] | None = None) -> None:
        """Take a router's list of all engines or, with the names of those `removed`, what has changed in it.

        Raises what the connector raises: its peers stay as they were, and the next change repeats this one.
        """
        before, gone = self._cards.pop(router_id, {}), set(removed or ())
        kept = {} if removed is None else {name: card for name, card in before.items() if name not in gone}
        self._cards[router_id] = kept | {card.engine: card for card in cards}
        self._update()

    def _update(self) -> None:
        """Connect to new incarnations and tear down those that no router knows any more."""
        cards = [card for known in self._cards.values() for card in known.values()]
        peers = {card.epoch: card for card in cards if card.engine != self._engine}
        added = [card for epoch, card in peers.items() if epoch not in self._peers]
        removed = [card for epoch, card in self._peers.items() if epoch not in peers]
        if self._connector is not None:
            self._connector.update_peers(list(peers.values()))
            self.workers.update_peers(added, removed)
        self._peers = peers

    def refused(self, added: Sequence[EngineCard], removed: Sequence[EngineCard], error: Exception) -> None:
        """Note that the workers refused an earlier change: the next change repeats it."""
        self.counters.dropped_messages += 1
        logger.error("the connector's workers refused a change of peers: %s", error, exc_info=error)
        for card in added:
            self._peers.pop(card.epoch, None)
        self._peers.update((card.epoch, card) for card in removed)
