"""The engines as the router sees them: card, life, load, breaker, and the pairs whose transfers failed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from pdkv.errors import IncompatiblePeers
from pdkv.router.books import Books
from pdkv.router.policies import EngineView, Side
from pdkv.wire.messages import BlockCounts, EngineCard, LoadReport, Order
from pdkv.wire.refusal_note import RefusalNote

EngineLife = Literal["starting", "ready", "dead"]

ORDERS: tuple[Order, ...] = ("prefill_first", "needs_peer_first", "concurrent")
"""Hand-off orders by preference; decode_first is taken only where it is asked for."""

BREAKER_FAILURES = 5
"""Consecutive failures that open an engine's breaker."""

BREAKER_OPEN_S = 10.0
"""How long an engine is passed over then; one more failure afterwards opens it again."""

TICK_S = 0.5
"""How often the router counts for how long its engines have been silent."""

SUSPECT_TICKS = 6
"""An engine that should send Beats and has said nothing for so many ticks is a suspect: stopped, or starved."""

STUCK_STEP_S = 120.0
"""An engine whose loop has been at one thing for so long is a suspect, too, although its process runs."""

PAIR_MARK_S = 10.0
"""How long a (prefill, decode) pair is passed over after a failed KV load."""


@dataclass(slots=True)
class EngineState:
    """One engine. `life` "starting": never seen ready; "dead": was ready, and may come back."""

    name: str
    role: str  # as configured; its card repeats it
    life: EngineLife = "starting"
    card: EngineCard | None = None  # of the last incarnation
    load: LoadReport | None = None  # the last report of this incarnation
    books: Books = field(default_factory=Books)  # what this router has given this incarnation
    num_deaths: int = 0
    num_quiet_ticks: int = 0  # since it was heard last
    busy_s: float = 0.0  # how long its loop had been at one thing, at its last beat
    num_failures: int = 0  # in a row
    open_until: float = 0.0
    refusal: str | None = None  # why the incarnation that came last stays out
    note: RefusalNote | None = None  # where a launcher says why it keeps the engine out

    @property
    def blocks(self) -> BlockCounts:
        """The ownership equation as reported; before the first report all blocks are free."""
        if self.load is not None:
            return self.load.blocks
        total = self.card.num_blocks if self.card is not None else 0
        return BlockCounts(total=total, free=total, cached=0, active=0, leased=0, quarantined=0)

    def succeeded(self) -> None:
        """A request went well: the breaker closes."""
        self.num_failures = 0
        self.open_until = 0.0

    def failed(self, now: float) -> None:
        """A request failed by the engine's fault."""
        self.num_failures += 1
        if self.num_failures >= BREAKER_FAILURES:
            self.open_until = now + BREAKER_OPEN_S

    @property
    def silent_for_s(self) -> float:
        """For how long an engine that is ready has said nothing; 0 for one that sends no beats."""
        return self.num_quiet_ticks * TICK_S if self.life == "ready" and self._beats else 0.0

    @property
    def suspect(self) -> bool:
        """Whether it seems to be stopped or stuck. It may go on: nothing is taken from it."""
        return self.silent_for_s >= SUSPECT_TICKS * TICK_S or (self.life == "ready" and self.busy_s >= STUCK_STEP_S)

    @property
    def _beats(self) -> bool:
        return self.card is not None and bool(self.card.beats)

    @property
    def condition(self) -> str:
        """For people: "is ready", or why it cannot answer now."""
        if self.life != "ready" or not self.suspect:
            return f"is {self.life if self._reason() is None else 'refused'}"
        if self.busy_s >= STUCK_STEP_S:
            return f"has been in one step for {self.busy_s:.0f} s"
        return f"has been silent for {self.silent_for_s:.1f} s"

    @property
    def connector_problem(self) -> str | None:
        """Why the connector of the engine cannot be used now, as it said last: it computes what it misses."""
        return self.load.connector_problem or None if self.load is not None and self.life == "ready" else None

    @property
    def pid(self) -> int | None:
        """Of the incarnation that is ready."""
        return self.card.pid if self.card is not None and self.life == "ready" else None

    def describe(self) -> dict[str, Any]:
        """JSON-ready: what the engine is and does; load, busy_s and blocks as it said last.

        State "refused" has a reason: the engine cannot work with the others, and gets no request.
        """
        load, reason = self.load, self._reason()
        return {
            "name": self.name,
            "role": self.role,
            "pid": self.pid,
            "ranks": list(self.card.rank_pids) if self.card is not None and self.life == "ready" else [],
            "state": self.life if reason is None else "refused",
            "reason": reason,
            "suspect": self.suspect,
            "silent_for_s": self.silent_for_s,
            "busy_s": round(self.busy_s, 3) if self.life == "ready" else 0.0,
            "waiting": load.waiting if load is not None else 0,
            "running": load.running if load is not None else 0,
            "blocks": msgspec.to_builtins(self.blocks),
            "connector_problem": self.connector_problem,
        }

    def _reason(self) -> str | None:
        if self.life == "ready":
            return None
        return self.refusal or (self.note.read() if self.note is not None else None)

    def view(self, side: Side) -> EngineView:
        """What a policy sees of it as a candidate for one side; an aggregated engine's work is one."""
        books = self.books
        if self.role == "any":
            return EngineView(self.name, books.prefill_tokens + books.kv_tokens)
        return EngineView(self.name, books.prefill_tokens if side == "prefill" else books.kv_tokens)


class EngineSnapshot(NamedTuple):
    """One engine for metrics and people."""

    name: str
    role: str
    state: str  # "starting", "ready", "dead"
    pid: int | None
    load: LoadReport | None  # the last report
    in_flight: int  # requests of this router
    num_deaths: int


class Counters:
    """What dispatch counted since start."""

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self.aborted = 0
        self.retried = 0
        self.failed: Counter[str] = Counter()  # by error code
        self.dropped_messages = 0  # of requests or attempts that had ended, or that nobody knows
        self.duplicate_tokens = 0
        self.load_failures = 0


class Fleet:
    """All engines by name. Names are fixed; incarnations come and go."""

    def __init__(self, *, complete_once: bool = False, identity: str = "") -> None:
        """`identity`: of the model that engines must have; empty: that of the first one that comes up."""
        self.engines: dict[str, EngineState] = {}
        self.complete_once = complete_once  # every engine has been ready at the same time
        self._identity = identity
        self._marks: dict[tuple[str, str], float] = {}  # pair -> end of the mark

    def add(self, name: str, role: str, note: RefusalNote | None = None) -> EngineState:
        """Make an engine known that has yet to start."""
        assert name not in self.engines, f"two engines are named {name}"
        state = self.engines[name] = EngineState(name, role, note=note)
        return state

    def came_up(self, name: str, card: EngineCard) -> EngineState:
        """An incarnation of the engine is ready.

        Raises:
            IncompatiblePeers: it cannot exchange KV with the engines that are ready, or has another model than the
                deployment started with; it stays out.
        """
        state = self.engines[name]
        try:
            for other in self.cards():
                check_compatible(other, card)
            if self._identity and card.model != self._identity:
                raise IncompatiblePeers(
                    f"{name} has model {card.model}, but the deployment started with model {self._identity}"
                )
        except IncompatiblePeers as error:
            state.refusal = str(error)
            raise
        self._identity = card.model
        state.refusal = None
        state.life, state.card, state.load, state.books = "ready", card, None, Books()
        state.role, state.num_quiet_ticks, state.busy_s = card.role, 0, 0.0
        state.succeeded()
        self.complete_once = self.complete_once or all(e.life == "ready" for e in self.engines.values())
        return state

    def went_down(self, name: str) -> None:
        """The incarnation that was ready is gone."""
        state = self.engines[name]
        state.life, state.load, state.books = "dead", None, Books()
        state.num_deaths += 1
        self._marks = {pair: end for pair, end in self._marks.items() if name not in pair}

    def cards(self) -> list[EngineCard]:
        """Cards of the engines that are ready."""
        return [e.card for e in self.engines.values() if e.life == "ready" and e.card is not None]

    def is_ready(self, name: str) -> bool:
        """Whether messages to the engine can be answered."""
        return self.engines[name].life == "ready"

    def candidates(self, side: Side, now: float, *, without: Sequence[str] = ()) -> list[EngineView]:
        """Ready engines that can be this side of a request.

        Engines in `without`, then suspects, then those with an open breaker are left out if others are left.
        """
        ready = [e for e in self.engines.values() if e.life == "ready" and e.role in (side, "any")]
        others = [e for e in ready if e.name not in without] or ready
        awake = [e for e in others if not e.suspect] or others
        closed = [e for e in awake if e.open_until <= now] or awake
        return [e.view(side) for e in closed]

    def tick(self) -> None:
        """TICK_S have passed; who speaks sets its own count back."""
        for engine in self.engines.values():
            engine.num_quiet_ticks += 1

    @property
    def fault(self) -> str:
        """Why no prompt can be run and decoded now, for people; empty where one can be."""
        live = {e.role for e in self.engines.values() if e.life == "ready" and not e.suspect}
        for role in ("prefill", "decode"):
            if "any" not in live and role not in live:
                engines = [f"{e.name} {e.condition}" for e in self.engines.values() if e.role in (role, "any")]
                return f"no {role} engine is live: {', '.join(engines) or 'there is none'}"
        return ""

    def mark(self, prefill: str, decode: str, now: float) -> None:
        """A KV load from `prefill` to `decode` failed."""
        self._marks[prefill, decode] = now + PAIR_MARK_S

    def marked_pairs(self, now: float) -> frozenset[tuple[str, str]]:
        """Pairs that are passed over now."""
        if not self._marks:
            return frozenset()
        self._marks = {pair: end for pair, end in self._marks.items() if end > now}
        return frozenset(self._marks)

    def order(self, prefill: str, decode: str, preferred: Sequence[Order]) -> Order:
        """The first preferred order that both cards allow.

        Raises:
            IncompatiblePeers: there is none.
        """
        mine, theirs = self.engines[prefill].card, self.engines[decode].card
        assert mine is not None
        assert theirs is not None
        for order in preferred:
            if order in mine.orders and order in theirs.orders:
                return order
        raise IncompatiblePeers(
            f"{prefill} allows the hand-off orders {mine.orders}, {decode} allows {theirs.orders}, "
            f"and the router takes one of {list(preferred)}"
        )


def check_compatible(mine: EngineCard, theirs: EngineCard) -> None:
    """Raise IncompatiblePeers, with both values, for two engines that cannot serve one model together."""
    for what, a, b in (
        ("model", mine.model, theirs.model),
        ("KV layout", mine.layout.identity, theirs.layout.identity),
        ("hash block size", mine.hash_block_size, theirs.hash_block_size),
        ("connector", mine.connector, theirs.connector),
    ):
        if a != b:
            raise IncompatiblePeers(f"{mine.engine} has {what} {a}, {theirs.engine} has {b}")
