"""All engines as the router sees them: which are ready, fit together, and can be chosen."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from pdkv.errors import IncompatiblePeers
from pdkv.router.engines.books import CONTEXT_WEIGHT, Books
from pdkv.router.engines.candidate import EngineView, Side
from pdkv.router.engines.events import Events
from pdkv.router.engines.health import EngineHealth
from pdkv.router.engines.members import FEW, Members
from pdkv.router.engines.outliers import GAP_SHARE, MIN_PACES, PROMPT_SHARE, BadPairs, Usual, typical
from pdkv.router.engines.speeds import Speeds
from pdkv.router.engines.state import EngineState, Versions
from pdkv.router.request import GenerateRequest
from pdkv.wire.kv import EngineCard, Order
from pdkv.wire.refusal_note import RefusalNote
from pdkv.wire.reports import LoadReport

logger = logging.getLogger(__name__)

REVIEW_S = 0.5
"""Seconds between comparisons of engines' paces; failures are compared at once."""

ORDERS: tuple[Order, ...] = ("prefill_first", "needs_peer_first", "concurrent")
"""Hand-off orders by preference; decode_first is used only if requested."""

EQUAL_PACE, MAX_PACE = 1.25, 8.0
"""How much faster or slower than its peers an engine may be measured and count as equal, and the most that counts."""

FALLBACK = "fallback"
"""The name and the role of another deployment that runs requests when this one cannot: it is on no side."""

MANY = 2 * FEW
"""Engines of a side up to which all of them are looked at for each request."""


class Sums:
    """The number of some values, their sum, and that of their squares."""

    def __init__(self) -> None:
        self.count, self.total, self.squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.count, self.total, self.squares = self.count + 1, self.total + value, self.squares + value**2


class Counters:
    """Counts of what dispatch has done since the start."""

    def __init__(self) -> None:
        self.started = 0
        self.finished = 0
        self.aborted = 0
        self.retried = 0  # started again on other engines before the first token
        self.migrated = 0  # continued on other engines after the first token
        self.failed: Counter[str] = Counter()  # by error code
        self.faults: Counter[str] = Counter()  # failed attempts, by whose fault they were
        self.dropped_messages = 0  # about requests or attempts that had ended or are unknown
        self.duplicate_tokens = 0
        self.load_failures = 0
        # tokens of prompts by (role of the prompt's engine, "pool" or "store")
        self.reachable_hits: Counter[tuple[str, str]] = Counter()  # cached on any engine, or below
        self.achieved_hits: Counter[tuple[str, str]] = Counter()  # of its engine's own, or loaded
        self.loans: Counter[str] = Counter()  # by how they ended: "ok" or a code
        self.prompts = Sums()  # tokens of prompts that engines were given to compute


class Fleet:
    """All engines by name. Incarnations come and go."""

    def __init__(self, *, complete_once: bool = False, identity: str = "") -> None:
        """`identity`: identity of the model that engines must have; empty: that of the first engine to come up."""
        self.engines: dict[str, EngineState] = {}
        self.complete_once = complete_once  # every engine has been ready at the same time
        self.awaits_others = False  # engines may join that are not yet known
        self.identity = identity
        self._shortest = math.inf  # of all lengths that engines ever had
        self.pairs = BadPairs()
        self._usual: defaultdict[str, Usual] = defaultdict(Usual)  # by role
        self._reviewed_at = -math.inf
        self.speeds = Speeds()
        self.events = Events()
        self.sides: dict[Side, Members] = {"prefill": Members("prefill"), "decode": Members("decode")}
        self.doubted: list[EngineState] = []  # suspects at the last tick
        self._mostly_ejected: set[Side] = set()  # sides more than half of which were ejected at the last tick
        self._are_mixed = False  # whether engines that are ready speak several versions
        self._gaps: dict[tuple[Versions, Versions], str] = {}  # why those of such versions cannot exchange KV

    def add(
        self, name: str, role: str, note: RefusalNote | None = None, *, endpoint: str = "", source: str = "launch"
    ) -> EngineState:
        """Add an engine that has yet to start."""
        assert name not in self.engines, f"two engines are named {name}"
        state = self.engines[name] = EngineState(name, role, note=note, endpoint=endpoint, source=source)
        return state

    def look_at(self, engine: EngineState) -> None:
        """Note that what it is ready for, or how much it holds, may have changed."""
        for members in self.sides.values():
            members.put(engine)
        self._are_mixed = len({v for members in self.sides.values() for v in members.versions}) > 1

    def _noticed(self, name: str) -> None:
        for members in self.sides.values():
            members.noticed(name)

    def remove(self, name: str) -> None:
        """Remove an engine that is down or never came up."""
        del self.engines[name]
        self.pairs.forget(name)

    def came_up(self, name: str, card: EngineCard) -> EngineState:
        """Note that an incarnation of the engine is ready.

        Raises:
            IncompatiblePeers: the engine cannot exchange KV with the engines that are ready, or has another model than
                the deployment started with. It is then refused.
        """
        state = self.engines[name]
        try:
            self.check(name, card)
        except IncompatiblePeers as error:
            state.refusal, state.refused_card = str(error), card
            raise
        if self._is_own(name):
            if not self.identity:
                logger.info("%s is the first, and decides which model the others must have: %s", name, card.model)
            self.identity = card.model
            self._shortest = min(self._shortest, card.max_model_len)
        state.refusal = state.refused_card = None
        state.life, state.card, state.load = "ready", card, None
        state.books = Books(noticed=partial(self._noticed, name))
        state.role = state.assigned or card.role
        heads, each = card.layout.kv_heads_of_all_ranks, card.layout.num_kv_heads
        state.token_bytes, state.versions = card.layout.token_bytes * heads // each, _versions_of(card)
        state.health = EngineHealth(beats=card.beats.startswith("ipc://"))  # the port of others may be out of reach
        self.complete_once = self.complete_once or all(e.life == "ready" for e in self.own())
        self.look_at(state)
        self._compare_versions(state)
        if self._is_own(name):
            self._compare_lengths(state, card)
        return state

    def _compare_lengths(self, state: EngineState, card: EngineCard) -> None:
        """Say that an engine takes shorter requests than all others that decode: its limit is the service's."""
        decoding = (e for e in self.own() if e is not state and e.role != "prefill" and e.life == "ready")
        shortest = min((e.card.max_model_len for e in decoding if e.card is not None), default=0)
        if state.role != "prefill" and card.max_model_len < shortest:
            lengths = card.max_model_len, shortest
            logger.warning(
                "%s takes at most %d tokens a request, so the service does; before: %d", state.name, *lengths
            )

    def _compare_versions(self, state: EngineState) -> None:
        """Say with which engines this one's connectors share no version: those of one version are named by one."""
        named = {state.versions}
        for other in self.engines.values() if self._are_mixed else ():
            if other.life == "ready" and other.versions not in named:
                named.add(other.versions)
                if gap := self._gap(state.versions, other.versions):
                    logger.warning("no KV passes between %s and %s: %s", state.name, other.name, gap)

    def _gap(self, mine: Versions, theirs: Versions) -> str:
        if (mine, theirs) not in self._gaps:
            self._gaps[mine, theirs] = _version_gap(dict(mine), dict(theirs))
        return self._gaps[mine, theirs]

    def can_hand_over(self, prefill: str, decode: str) -> bool:
        """Whether KV can be passed between the two, as far as their cards tell."""
        return not (self._are_mixed and self._gap(self.engines[prefill].versions, self.engines[decode].versions))

    def has_reader(self, engine: EngineState, side: Side) -> bool:
        """Whether KV can be passed between it and some ready engine of that side."""
        versions = self.sides[side].versions
        return not self._are_mixed or any(not self._gap(engine.versions, theirs) for theirs in versions)

    def check(self, name: str, card: EngineCard) -> None:
        """Raise IncompatiblePeers if it cannot work with the engines that are ready, or has another model."""
        if not self._is_own(name):  # no KV passes between the two, and that the model is the same, the operator says
            return
        if (other := self.any_card) is not None:  # all others agree with it
            check_compatible(other, card)
        if self.identity and card.model != self.identity:
            raise IncompatiblePeers(
                f"{name} has model {card.model}, but the deployment started with model {self.identity}"
            )

    def no_longer_refused(self) -> Iterator[EngineCard]:
        """Cards of refused engines that are still connected and may come up now, one after the other."""
        for engine in list(self.engines.values()):
            if engine.refused_card is not None:
                try:
                    self.check(engine.name, engine.refused_card)
                except IncompatiblePeers as error:
                    engine.refusal = str(error)
                    continue
                yield engine.refused_card

    def left(self, name: str) -> None:
        """Note that the connection to an engine has ended; a refused one can no longer come up."""
        if name in self.engines:
            self.engines[name].refused_card = None

    def reported(self, name: str, load: LoadReport) -> None:
        """Take a report of an engine that is up."""
        state = self.engines[name]
        self.speeds.reported(name, load)
        before = (state.kv_capacity, state.has_slack)
        state.load = load
        state.answered = max(state.answered, load.answers)
        if before != (state.kv_capacity, state.has_slack):
            self.look_at(state)

    def went_down(self, name: str, now: float) -> None:
        """Note that the incarnation that was ready is gone."""
        state = self.engines[name]
        state.life, state.load, state.books = "dead", None, Books()
        state.num_deaths += 1
        self.look_at(state)
        self.speeds.forget(name)
        state.health = EngineHealth()
        if not state.draining:  # else its end was expected
            state.score.died(now)
            self._compare(state.role, now)

    def _is_own(self, name: str) -> bool:
        return name not in self.engines or self.engines[name].role != FALLBACK

    def own(self) -> list[EngineState]:
        """All engines but another deployment."""
        return [e for e in self.engines.values() if e.role != FALLBACK]

    def cards(self) -> list[EngineCard]:
        """Cards of the engines of this deployment that are ready."""
        return [e.card for e in self.own() if e.life == "ready" and e.card is not None]

    @property
    def any_card(self) -> EngineCard | None:
        """Card of some engine that is ready: what keys and compatibility depend on is the same in all."""
        return next((e.card for members in self.sides.values() for e in members.engines.values()), None)

    def is_ready(self, name: str) -> bool:
        """Whether the engine can answer messages; False for one that was removed."""
        state = self.engines.get(name)
        return state is not None and state.life == "ready"

    def candidates(
        self,
        side: Side,
        now: float,
        *,
        without: Collection[str] = (),
        near: Collection[str] | None = None,
        prefill: str = "",
    ) -> list[EngineView]:
        """Ready engines that can be this side of a request, except draining and silent ones, which would not answer.

        As long as others remain, these are left out, in this order: engines in `without`, suspects, those without a
        compatible partner, those whose pairs fail, and at most half of what is left that is ejected: too few engines
        for all requests would be worse than a bad one.

        Args:
            near: of a large fleet only these and the least loaded; None: of any fleet all.
            prefill: the engine whose KV they read. Of a large fleet, only those that can.
        """
        members = self.sides[side]
        other: Side = "decode" if side == "prefill" else "prefill"
        failing = self.pairs.avoided(now)
        unpaired = self._without_partner(side, failing) if failing else ()

        def fits(e: EngineState) -> bool:
            if e.name in without or not e.is_well(now):
                return False
            if prefill and ((prefill, e.name) in failing or not self.can_hand_over(prefill, e.name)):
                return False
            return e.role == "any" or (e.name not in unpaired and self.has_reader(e, other))

        sees_few = near is not None and len(members) > MANY and side not in self._mostly_ejected
        if few := members.few(near or (), fits) if sees_few else []:
            return [e.view(side, now) for e in few]
        able = [e for e in self.engines.values() if e.name in members.engines]
        if all(map(fits, able)):
            return [e.view(side, now) for e in able]
        ready = [e for e in able if not (e.draining or e.is_silent)]
        others = [e for e in ready if e.name not in without] or ready
        awake = [e for e in others if not e.suspicion] or others
        understood = [e for e in awake if e.role == "any" or self.has_reader(e, other)] or awake
        paired = [e for e in understood if e.role == "any" or e.name not in unpaired] or understood
        held = [e for e in paired if e.score.held_until(now)]
        if held and len(held) < len(paired):
            num_left = max(len(paired) - len(held), (len(paired) + 1) // 2)
            paired = sorted(paired, key=lambda e: e.score.held_until(now))[:num_left]
        return [e.view(side, now) for e in paired]

    def too_short(self, request: GenerateRequest, num_output: int) -> set[str]:
        """Engines whose max_model_len is too small for a request that has `num_output` tokens already: engines that
        decode must take its full length, prefill engines the prompt, the output so far and one more token.
        """
        most = request.most_tokens(num_output)
        if most <= self._shortest:
            return set()
        so_far = min(len(request.prompt_token_ids) + num_output + 1, most)
        return {e.name for e in self.engines.values() if not e.takes(so_far if e.role == "prefill" else most)}

    def decode_suffices(self, short: Collection[str]) -> bool:
        """Whether decode engines compute a prompt for which these engines are `too_short`: prefill engines are among
        them.
        """
        return any(self.engines[name].role == "prefill" for name in short)

    def can_lend(self, lender: str, borrower: str, failing: Collection[tuple[str, str]]) -> bool:
        """Whether `borrower` may be told to read what `lender` has cached. One that is draining still lends.

        `failing`: pairs to be avoided now.
        """
        one, other = self.engines[lender], self.engines[borrower]
        if not (one.life == other.life == "ready" and one.card is not None and one.card.lends) or one.suspicion:
            return False
        return (lender, borrower) not in failing and self.can_hand_over(lender, borrower)

    def _without_partner(self, side: Side, pairs: Collection[tuple[str, str]]) -> frozenset[str]:
        """Engines of this role all of whose pairs with engines of other roles are among these."""
        own, other = (0, 1) if side == "prefill" else (1, 0)
        partners = self.sides["decode" if side == "prefill" else "prefill"].engines.keys()
        counts = Counter(pair[own] for pair in pairs if pair[other] in partners)
        return frozenset(name for name, count in counts.items() if count == len(partners))

    def failed(self, name: str, now: float) -> None:
        """Note that a request failed by the engine's fault. Harmless if it was removed."""
        if (engine := self.engines.get(name)) is None:
            return
        engine.score.failed(now)
        if engine.role == FALLBACK:  # without peers, one failure is too much
            engine.score.eject(now)
        elif not engine.score.is_ejected and engine.score.value(now, self._usual[engine.role].pace) >= 1.0:
            self._compare(engine.role, now)

    def succeeded(self, name: str, now: float) -> None:
        """Note that a request, or the engine's part in it, succeeded there."""
        engine = self.engines[name]
        was_ejected = engine.score.is_ejected
        engine.score.succeeded(now, self._usual[engine.role].pace)
        if was_ejected and not engine.score.is_ejected:
            self.events.note(now, "recovered", name)
        engine.health.answered(now)

    def answered(self, name: str, work: int, seconds: float) -> None:
        """Note how long an answer took the engine, which had so much to do for its role: tokens to compute before the
        end of a prompt, or requests beside a token.
        """
        engine = self.engines[name]
        share = PROMPT_SHARE if engine.role == "prefill" else GAP_SHARE
        engine.score.paced(self._usual[engine.role].relate(work, seconds), share)

    def review(self, now: float) -> None:
        """Compare all engines with their peers, once per REVIEW_S."""
        if now - self._reviewed_at >= REVIEW_S:
            self._reviewed_at = now
            for role in {e.role for e in self.engines.values()}:
                self._compare(role, now)
                self._measure([e for e in self.engines.values() if e.role == role and e.life == "ready"], now)

    def _measure(self, peers: Sequence[EngineState], now: float) -> None:
        """Take over how fast the engines of a role are."""
        paces = self.speeds.paces([e.name for e in peers], now)
        weights = [self.speeds.context_weight(e.name) for e in peers]  # one for all: who has much KV is never at rest
        weight = typical([w for w in weights if w is not None]) or CONTEXT_WEIGHT
        for engine in peers:
            pace = paces.get(engine.name, 1.0)
            if engine.role == "decode":
                pace = engine.score.relative_pace(self._usual["decode"].pace)
            pace = min(max(pace, 1 / MAX_PACE), MAX_PACE) if max(pace, 1 / pace) > EQUAL_PACE else 1.0
            engine.token_s = self.speeds.work_token_s(engine.name)
            if (pace, weight) != (engine.pace, engine.context_weight):
                engine.pace, engine.context_weight = pace, weight
                self._noticed(engine.name)

    def _compare(self, role: str, now: float) -> None:
        """Eject the outliers among the engines of a role; decide the trials of those that have answered often enough.

        A score is one if it exceeds twice what is typical by 1.
        """
        peers = [e for e in self.engines.values() if e.role == role and e.life == "ready"]
        usual = self._usual[role]
        usual.pace = typical([e.score.pace for e in peers if e.score.num_paces >= MIN_PACES])
        values = {e.name: e.score.value(now, usual.pace) for e in self.engines.values() if e.role == role}
        most = 1.0 + 2.0 * typical([values[e.name] for e in peers])
        for name, value in values.items():
            engine = self.engines[name]
            if not engine.score.is_ejected and value >= most:
                logger.warning("%s is ejected: its score is %.1f, and %.1f is too much", name, value, most)
                engine.score.eject(now)
                self.events.note(now, "ejected", name, f"its score is {value:.1f}, and {most:.1f} is too much")
            elif engine.score.is_tried and engine.life == "ready":
                self.succeeded(name, now)

    def tick(self) -> None:
        """Count one tick of TICK_S of silence; engines that send something reset their own count."""
        for engine in self.engines.values():
            engine.health.tick(has_work=engine.books.requests > 0)
        self.doubted = [engine for engine in self.engines.values() if engine.suspicion]
        held = {s: sum(e.score.is_ejected for e in m.engines.values()) for s, m in self.sides.items()}
        self._mostly_ejected = {side for side, num in held.items() if 2 * num > len(self.sides[side])}

    @property
    def suspects(self) -> dict[str, str]:
        """Engines that seem to be stopped or stuck, and why."""
        return {e.name: reason for e in self.engines.values() if (reason := e.suspicion)}

    @property
    def fault(self) -> str:
        """Why no prompt can be run and decoded now, in words; empty if one can be."""
        live = {e.role for e in self.engines.values() if e.serves}
        for role in ("prefill", "decode"):
            if "any" not in live and role not in live:
                engines = [f"{e.name} {e.condition}" for e in self.engines.values() if e.role in (role, "any")]
                return f"no {role} engine is live: {', '.join(engines) or 'none is configured'}"
        return ""

    def order(self, prefill: str, decode: str, preferred: Sequence[Order]) -> Order:
        """The hand-off order of the two (`agreed_order`).

        Raises:
            IncompatiblePeers: there is none.
        """
        mine, theirs = self.engines[prefill].card, self.engines[decode].card
        assert mine is not None
        assert theirs is not None
        if (order := agreed_order(mine, theirs, preferred)) is not None:
            return order
        raise IncompatiblePeers(
            f"{prefill} allows the hand-off orders {mine.orders}, {decode} allows {theirs.orders}, "
            f"and the router takes one of {list(preferred)}"
        )


def agreed_order(prefill: EngineCard, decode: EngineCard, preferred: Sequence[Order]) -> Order | None:
    """The first preferred order that both cards allow. A prompt waits for its peer's blocks where a pool has no room
    for it beside the longest request: else each engine could keep its only room for what waits at the other one.
    """
    legal = [order for order in prefill.orders if order in decode.orders]
    order = next((order for order in preferred if order in legal), None)
    is_small = order == "concurrent" and not (prefill.holds_two and decode.holds_two)
    return "needs_peer_first" if is_small and "needs_peer_first" in legal else order


def _versions_of(card: EngineCard) -> Versions:
    """What must be equal where KV passes: of a version of the platform, what is before its second dot."""
    alike = {name: ".".join(card.platform[name].split(".")[:2]) for name in card.alike if name in card.platform}
    return tuple(sorted([*card.wire_versions.items(), *alike.items()], key=str))


def _version_gap(mine: Mapping[str, int | str], theirs: Mapping[str, int | str]) -> str:
    """The connector or library whose versions differ between the two, with both; empty if none is known to differ."""
    gaps = [(name, own, theirs[name]) for name, own in mine.items() if theirs.get(name, own) != own]
    return ", ".join(
        f"{name} is {own} and {other}" if isinstance(own, str) else
        f"connector {name} speaks version {own} and version {other}"
        for name, own, other in gaps
    )  # fmt: skip


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
