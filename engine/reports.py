"""Reports of an engine to routers: cache events, snapshots of the cache, its load."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdkv.engine.grammar_wait import GrammarWait
from pdkv.engine.hooks import DecodeHooks
from pdkv.engine.outbox import Outbox
from pdkv.engine.outside.lower_tiers import LowerTiers
from pdkv.engine.scheduler import Scheduler
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import CacheCleared, KVEvent, KVEvents
from pdkv.wire.reports import LoadReport, SourceCounts

MAX_KEYS_PER_EVENTS = 16_384
"""The most block keys in one KVEvents; more are sent in parts."""


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    computed: int = 0
    recomputed: int = 0
    local_hit: int = 0
    remote: int = 0
    store: int = 0
    dropped_messages: int = 0
    steps: int = 0
    non_finite: int = 0  # requests

    def add(self, sources: SourceCounts) -> None:
        """Add one choice's prompt tokens, by source."""
        self.computed += sources.computed
        self.recomputed += sources.recomputed
        self.local_hit += sources.local_hit
        self.remote += sources.remote
        self.store += sources.store


class Reports:
    """The routers of an engine and what each of them has been told."""

    def __init__(
        self, card: EngineCard, scheduler: Scheduler, decode: DecodeHooks, grammars: GrammarWait, outbox: Outbox
    ) -> None:
        self.routers: dict[str, str] = {}
        """Epochs of the connected routers, by their ids."""
        self.counters = Counters()
        self._card = card
        self._scheduler = scheduler
        self._decode = decode
        self._grammars = grammars
        self._outbox = outbox
        self._last_load: LoadReport | None = None
        self._event_number = 0
        self._lower_tiers = LowerTiers()
        self._asked: dict[str, int] = {}  # number of the last AskReport, by router
        self._begun: dict[str, int] | None = None  # those that await the ranks' answer
        self._told: set[str] = set()  # routers that were sent the whole cache since messages last left

    def join(self, router_id: str, epoch: str) -> None:
        """Send a new router everything."""
        self.routers.pop(router_id, None)  # it needs no events from before its snapshot
        self.flush_events()
        self.routers[router_id] = epoch
        self._send_snapshot(router_id)
        self._outbox(router_id, self.make_load())

    def leave(self, router_id: str) -> None:
        """Stop reporting to that router."""
        self.routers.pop(router_id, None)
        for numbers in (self._asked, self._begun or {}):
            numbers.pop(router_id, None)

    def resync(self, router_id: str) -> None:
        """Send the whole cache to a router that has missed events, once between two sendings."""
        if router_id in self.routers and router_id not in self._told:
            self._send_snapshot(router_id)

    def ask(self, router_id: str, number: int) -> None:
        """Note that a router requests a current report, under that number."""
        self._asked[router_id] = number

    def begin(self) -> bool:
        """Whether routers wait for a report and none is in progress: `answer` follows, once the ranks have answered."""
        if not self._asked or self._begun is not None:
            return False
        self._begun, self._asked = self._asked, {}
        return True

    def answer(self) -> None:
        """Report to the routers of the last `begin`: the ranks have answered."""
        load = self.make_load()
        for router_id, number in (self._begun or {}).items():
            self._outbox(router_id, msgspec.structs.replace(load, answers=number))
        self._begun = None

    def sent(self) -> None:
        """Note that all messages leave now."""
        self._told.clear()

    def flush_events(self) -> None:
        """Tell all routers what has entered and left the cache, and the tiers below it, since the last time."""
        pool = self._scheduler.kv.pool
        if pool.events:
            events, pool.events = pool.events, []
            self._event_number += 1
            for part in _parts(self._event_number, events):
                for router_id in self.routers:
                    self._outbox(router_id, part)
        tiers = self._scheduler.external.take_tier_events(self._card.connector)
        if tiers:
            for told in self._lower_tiers.update(tiers):
                for router_id in self.routers:
                    self._outbox(router_id, told)

    def _send_snapshot(self, router_id: str) -> None:
        """Send one router the whole cache, under the number of the last events, and the known content of tiers
        below.
        """
        self._told.add(router_id)
        for told in self._lower_tiers.snapshot():
            self._outbox(router_id, told)
        for part in _parts(self._event_number, self._scheduler.kv.pool.snapshot_events()):
            self._outbox(router_id, part)

    def make_load(self) -> LoadReport:
        """The engine's current work and its counts."""
        loads, counters, scheduler = self._decode.counts(), self.counters, self._scheduler
        return LoadReport(
            waiting=len(scheduler.waiting) + len(scheduler.external.loads) + self._grammars.num_waiting,
            running=len(scheduler.running),
            blocks=scheduler.kv.pool.counts(),
            sources=SourceCounts(
                counters.computed, counters.recomputed, counters.local_hit, counters.remote, counters.store
            ),
            preemptions=scheduler.num_preemptions,
            load_failures=loads.num_failures,
            bytes_received=loads.bytes_received,
            dropped_messages=counters.dropped_messages + scheduler.external.num_unknown_results,
            transfer_seconds=loads.transfer_seconds,
            steps=counters.steps,
            damaged_values=scheduler.external.num_damaged,
            partial_loads=loads.num_partial,
            non_finite_requests=counters.non_finite,
            connectors=scheduler.external.get_stats(self._card.connector),
            connector_problem=scheduler.external.problem,
            drafts=scheduler.draft_counts.counts(),
        )

    def report_load(self) -> None:
        """Tell all routers the load if it has changed."""
        load = self.make_load()
        if load != self._last_load:
            self._last_load = load
            for router_id in self.routers:
                self._outbox(router_id, load)


def _parts(number: int, events: Sequence[KVEvent]) -> list[KVEvents]:
    """The events under one number, in messages of about MAX_KEYS_PER_EVENTS keys."""
    parts: list[list[KVEvent]] = [[]]
    num_keys = 0
    for event in events:
        if num_keys >= MAX_KEYS_PER_EVENTS:
            parts.append([])
            num_keys = 0
        parts[-1].append(event)
        num_keys += 1 if isinstance(event, CacheCleared) else len(event.keys)
    last = len(parts) - 1
    return [KVEvents(number, part, more=i < last) for i, part in enumerate(parts)]
