"""Receives engines' messages: engines come, go and report; every message is passed to what it is about."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

from pdkv.errors import IncompatiblePeers, PeerGone
from pdkv.router.engines.engine_orders import EngineOrders
from pdkv.router.engines.event_publisher import EventPublisher
from pdkv.router.engines.fleet import FALLBACK
from pdkv.router.generations.driver import Driver
from pdkv.router.generations.generation import Generation
from pdkv.router.routing.prefix_index import PrefixIndex, keys_needed
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.kv import EngineCard, KVHandoff
from pdkv.wire.messages import (
    Allocated,
    AskReport,
    Beat,
    CacheCleared,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    KVEvents,
    KVReady,
    Loaded,
    Release,
    Resync,
    RouterToEngine,
    Tokens,
    Trial,
)
from pdkv.wire.profiles import Profile, Profiled
from pdkv.wire.reports import LoadReport
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierEvents
from pdkv.wire.types import RequestKey

logger = logging.getLogger(__name__)


CARDS_PER_TURN, PEERS_PAUSE_S = 1024, 0.02
"""Cards of peers that are sent at once, some megabyte, and seconds until the next: of a thousand engines that start
together, each is told of many at a time, and what is on its way to them all stays small.
"""

ORPHANS_PER_TURN = 16
"""Generations of an engine that is gone that go on elsewhere in one turn of the event loop: five milliseconds."""

REPORT_TIMEOUT_S = 2.0
"""How long `fresh_reports` waits for engines: one that is stopped, or in a long step, does not answer."""


class Listener:
    """An `EngineListener` that keeps the fleet and the indexes of engines' caches, and passes on what is about
    generations.
    """

    def __init__(self, driver: Driver, index: PrefixIndex, tiers: TierIndex) -> None:
        self.fleet, self.index, self.tiers = driver.fleet, index, tiers
        send, is_ready = driver.send, driver.fleet.is_ready
        self.cache_orders = EngineOrders[CacheOrder, CacheAnswer](send, is_ready, CacheOrder.failed)
        self.profiles = EngineOrders[Profile, Profiled](send, is_ready, Profile.failed)
        self.publisher: EventPublisher | None = None  # of what engines have cached
        self._driver, self._news, self._counters = driver, driver.news, driver.counters
        self._report_number = 0
        self._orphans: deque[tuple[Generation, str]] = deque()  # generations of engines that are gone
        self._orphans_are_due = False  # more of them are about to go on elsewhere
        self._peers_are_due = False  # more engines are about to be told of their peers
        self._num_cards = 0  # that they were sent in this turn
        self._settled = asyncio.Event()  # whether this start succeeds or fails is known
        self._refusal: IncompatiblePeers | None = None  # why it fails

    @property
    def ready(self) -> bool:
        """Whether requests can be served: every engine has been ready once, and a pair is ready now."""
        roles = {e.role for e in self.fleet.engines.values() if e.life == "ready" and not e.draining}
        has_pair = "any" in roles or {"prefill", "decode"} <= roles
        return self.fleet.complete_once and not self._driver.closed and has_pair

    def connected(self) -> None:
        """Begin, in the running event loop, before any engine is there."""
        if self.publisher is not None:
            self.publisher.begin(self._resync)
        self._settle()

    def close(self) -> None:
        """End what goes on beside engines. Idempotent."""
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def _settle(self) -> None:
        """Note that requests can be served, or need not be yet where others are awaited."""
        if self.ready or (self.fleet.awaits_others and self.fleet.complete_once):
            self._settled.set()

    async def wait_ready(self) -> None:
        """Wait until it has been ready for the first time.

        Raises:
            IncompatiblePeers: it never will be, since an engine of the first start cannot work with the others.
        """
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    async def fresh_reports(self, timeout_s: float = REPORT_TIMEOUT_S) -> bool:
        """Ask all engines that are ready and not silent for a report; return when each has sent one, or is gone.

        Returns:
            False: one did not within `timeout_s`; its earlier report remains.
        """
        self._report_number += 1
        number = self._report_number
        asked = [(engine, engine.card) for engine in self.fleet.engines.values() if engine.life == "ready"]
        asked = [(engine, card) for engine, card in asked if not engine.is_silent]
        for engine, _ in asked:
            self._driver.send(engine.name, AskReport(number))

        def are_there() -> bool:
            return self._driver.closed or not any(
                engine.answered < number and engine.life == "ready" and engine.card is card for engine, card in asked
            )

        return await self._driver.changes.wait_for(are_there, timeout_s)

    def _resync(self) -> None:
        """Have all engines say again what they have cached."""
        for engine in self.fleet.engines.values():
            if engine.life == "ready":
                self._driver.send(engine.name, Resync())

    # --- messages of engines (EngineListener) ---------------------------------------------------------------------

    def engine_up(self, name: str, card: EngineCard) -> None:
        """Take a ready incarnation into use; its peers are told."""
        self._move_orphans(len(self._orphans))  # of its predecessor, perhaps
        try:
            self.fleet.came_up(name, card)
        except IncompatiblePeers as error:
            self._note_refusal(name, error)
            return
        logger.info("%s is ready (pid %d, epoch %s)", name, card.pid, card.epoch)
        self.fleet.events.note(self._driver.clock(), "up", name)
        if name == FALLBACK:  # a peer of no engine
            self._driver.changed(engines=True)
            return
        keys_per_block = -(-card.layout.block_size // card.hash_block_size)
        num_needed = keys_needed(card.layout, card.hash_block_size)
        self.index.add_engine(name, card.num_blocks * keys_per_block, num_needed=num_needed)
        self.tiers.add_engine(name)
        self._news.came_up(card)
        self._send_peers()
        self._driver.changed(engines=True)
        self._settle()

    def engine_refused(self, name: str, error: IncompatiblePeers) -> None:
        """Keep an engine out that says itself that it cannot be one of this fleet, until it comes up."""
        state = self.fleet.engines[name]
        if state.refusal != str(error):
            state.refusal = str(error)
            self._note_refusal(name, error)

    def _note_refusal(self, name: str, error: IncompatiblePeers) -> None:
        """Log a refusal; the first start ends with it."""
        logger.error("%s is refused: %s", name, error)
        self.fleet.events.note(self._driver.clock(), "refused", name, str(error))
        if not self.fleet.complete_once and name != FALLBACK:
            self._refusal = error
            self._settled.set()

    def engine_down(self, name: str, reason: str, suspects: Collection[RequestKey] = ()) -> None:
        """Note that an incarnation is gone: its work continues elsewhere, and its peers are told.

        One of the `suspects` may have killed it.
        """
        self.fleet.left(name)
        if not self.fleet.is_ready(name):
            return
        logger.warning("%s is gone: %s", name, reason)
        self.fleet.events.note(self._driver.clock(), "down", name, reason)
        self.fleet.went_down(name, self._driver.clock())
        if name != FALLBACK:
            self._news.went_down(name)
        self.index.remove_engine(name)
        self.tiers.remove_engine(name)
        self.cache_orders.engine_down(name)
        self.profiles.engine_down(name)
        if self.publisher is not None:
            self.publisher.publish(name, [CacheCleared()])
        victims = [g for g in self._driver.generations.values() if name in g.flow.route[:2]]
        try:
            self._driver.recovery.engine_died(name, victims, suspects)
        except Exception:
            logger.exception("an error while finding out who ended %s; its requests go on elsewhere", name)
        self._orphans.extend((generation, name) for generation in victims)
        self._orphans.extend((g, name) for g in self._driver.generations.values() if g.flow.loan.lender == name)
        self._move_orphans(ORPHANS_PER_TURN)
        self._send_peers()
        self._driver.changed(engines=True)
        for card in self.fleet.no_longer_refused():
            self.engine_up(card.engine, card)

    def engine_removed(self, name: str) -> None:
        """An engine is removed: its work ends or continues elsewhere at once, as if it had died."""
        self.engine_down(name, "it was removed")
        self._move_orphans(len(self._orphans))
        if self.publisher is not None:
            self.publisher.forget(name)

    def _move_orphans(self, most: int) -> None:
        """Let some generations go on without an engine that is gone; the others have their turn soon."""
        for _ in range(min(most, len(self._orphans))):
            generation, name = self._orphans.popleft()
            if name in generation.flow.route[:2]:
                self._driver.advance(generation, partial(generation.flow.engine_died, name), f"the end of {name}")
            if generation.flow.loan.lender == name:
                self._driver.go_without_loan(generation, PeerGone.code)
        if self._orphans and not self._orphans_are_due:
            self._orphans_are_due = True
            asyncio.get_running_loop().call_soon(self._move_more_orphans)

    def _move_more_orphans(self) -> None:
        self._orphans_are_due = False
        if not self._driver.closed:
            self._move_orphans(ORPHANS_PER_TURN)

    def engine_messages(self, name: str, messages: Sequence[RouterToEngine | EngineToRouter]) -> None:
        """Take one frame of an engine that is up."""
        if not self.fleet.is_ready(name):
            self._counters.dropped_messages += sum(not isinstance(m, Beat) for m in messages)
            return
        now = self._driver.clock()
        if not isinstance(messages[0], Beat):
            self.fleet.engines[name].health.heard()
        for message in messages:
            try:
                if isinstance(message, Tokens):
                    self._driver.take_tokens(name, message, now, is_first=message is messages[0])
                else:
                    self._take(name, message, now)
            except Exception as error:
                self._driver.mishandled(name, message, error)

    def _take(self, name: str, message: RouterToEngine | EngineToRouter, now: float) -> None:
        """Act on a message that brings no tokens."""
        match message:
            case HandedOff() | KVReady() | Failed() if message.request_id in self._driver.loans:
                self._driver.handle_loan(name, message, now)
            case Finished() | KVHandoff() | HandedOff() | Allocated() | KVReady() | Loaded() | Failed():
                self._driver.handle(self._driver.generations.get(message.request_id), name, message, now)
            case Release():
                self._driver.handle(self._driver.transfers.get(message.transfer_id), name, message, now)
            case LoadReport():
                self.fleet.reported(name, message)
                if message.answers:
                    self._driver.changed()
            case Beat():
                self.fleet.engines[name].health.beat(message)
            case Trial():
                self._driver.recovery.trials.hear(name, message)
                self._driver.send(name, message)
            case KVEvents():
                if self.publisher is not None:
                    self.publisher.publish(name, message.events)
                if not self.index.apply(name, message):
                    self._driver.send(name, Resync())
            case TierEvents():
                self.tiers.apply(name, message)
            case CacheAnswer():
                self._counters.dropped_messages += not self.cache_orders.answered(name, message)
            case Profiled():
                self._counters.dropped_messages += not self.profiles.answered(name, message)
            case _:
                self._counters.dropped_messages += 1

    def _send_peers(self) -> None:
        """Tell some engines what is new of their peers; the others have their turn soon, and at the latest before a
        message that may name such a peer.
        """
        while self._news.behind and self._num_cards < CARDS_PER_TURN:
            name = next(iter(self._news.behind))
            news = self._news.take(name)
            self._num_cards += len(news.cards) + len(news.removed or ()) + 1
            self._driver.send(name, news)
        if self._num_cards and not self._peers_are_due:
            self._peers_are_due = True
            asyncio.get_running_loop().call_later(PEERS_PAUSE_S, self._send_more_peers)

    def _send_more_peers(self) -> None:
        self._peers_are_due, self._num_cards = False, 0
        if not self._driver.closed:
            self._send_peers()
