"""Chooses the engines of a request: a snapshot per side for the policy, then an order that both engines allow."""

import functools
import logging
import math
import random
from collections.abc import Collection, Mapping, Sequence

import xxhash

from pdkv.base.log_limit import LogLimit
from pdkv.config import LocalTurns
from pdkv.errors import EngineUnavailable, IncompatiblePeers, NoEngine
from pdkv.router.engines.books import expected_output, kv_tokens
from pdkv.router.engines.candidate import SIDES, EngineView, Side
from pdkv.router.engines.fleet import MANY, Fleet
from pdkv.router.request import Offer, Route
from pdkv.router.routing.decision import Candidate, Choice, Reason
from pdkv.router.routing.holdings import Holdings, PromptKV
from pdkv.router.routing.policies import (
    BY_LOAD,
    DEFAULT_POLICY,
    POLICIES,
    Policy,
    Snapshot,
    cheapest_within,
    find_policy,
    prefix_aware,
)
from pdkv.wire.kv import Order

logger = logging.getLogger(__name__)

AFFINITY_TOKENS = 4096
"""Additional tokens that may wait on the engine of a `prompt_cache_key` before its request goes elsewhere."""


def prefer(engines: Sequence[EngineView], key: str) -> Sequence[EngineView]:
    """The candidates, with the one that belongs to `key` made to seem less loaded; it is the same engine for all
    requests with that key.

    The choice is by rendezvous hashing: when an engine comes or goes, only the keys that move to or from it change.
    """
    if not key:
        return engines
    own = max(engines, key=lambda engine: xxhash.xxh3_64_intdigest(f"{engine.name}\0{key}".encode()))
    return [e._replace(load=e.load - AFFINITY_TOKENS) if e is own else e for e in engines]


def apply_policy(policy: Policy, snapshot: Snapshot) -> str:
    """The name of the engine that a policy chooses. Raises what it raises, and ValueError if it is no candidate."""
    chosen = policy(snapshot)
    name = chosen.name if isinstance(chosen, EngineView) else None
    if policy not in POLICIES.values() and all(name != engine.name for engine in snapshot.engines):
        raise ValueError(f"a policy must return one of the engines of its snapshot, got {chosen!r:.100}")
    return chosen.name


class RouteChooser:
    """A policy applied to the fleet of one router and to the KV that its engines have of a prompt."""

    def __init__(
        self,
        fleet: Fleet,
        holdings: Holdings,
        *,
        policy: str,
        orders: Sequence[Order],
        rng: random.Random,
        take_over: bool = False,
        local_turns: LocalTurns = "auto",
    ) -> None:
        """`take_over`: if no engine of one role is ready, those of the other do its work, too. `local_turns`: whether
        one engine runs all of a request, if that costs less.

        Raises:
            ConfigError: an unknown policy.
        """
        self.policy, self.policy_name = find_policy(policy), policy
        self._holdings = holdings
        self._fleet = fleet
        self._orders = tuple(orders)
        self._rng = rng
        self._take_over = take_over
        self._local_turns = local_turns
        self._prefill_turn = 0
        self._decode_turn = 0
        self.num_policy_failures = 0  # choices of the default policy, in place of one that raised
        self._log_limit = LogLimit()
        self.num_local_turns = 0  # requests given to decode engines alone
        self.num_kept = 0  # requests given to prefill engines alone
        self._gap_s = 0.0  # recent average between two requests; 0: not known
        self._chose_at = 0.0
        self._num_prefill = 1  # candidates at the last choice

    def choose(
        self,
        prompt: PromptKV,
        now: float,
        *,
        without: Collection[str] = (),
        may_stay: bool = False,
        num_output: int = 0,
    ) -> Route:
        """The engines of both sides, none of them in `without` or too short; an aggregated engine is its own decode
        side.

        If prefill goes first, decode is left open, since which engine is free and alive is only known when the prompt
        is done. Prompts too long for prefill are run by decode alone.

        Args:
            may_stay: no output has been sent yet, so the request may stay on one engine.
            num_output: output tokens so far.

        Raises:
            NoEngine: no engine of a role is ready.
            EngineUnavailable: the two have no order in common.
        """
        if self._chose_at:
            self._gap_s += (now - self._chose_at - self._gap_s) * (0.1 if self._gap_s else 1.0)
        self._chose_at = now
        short = self._fleet.too_short(prompt.request, num_output)
        without = {*without, *short}
        prefill, decode = (self._candidates(side, now, without, prompt) for side in SIDES)
        most = prompt.request.most_tokens(num_output)
        able = decode if not prefill and (self._take_over or self._fleet.decode_suffices(short)) else []
        if self._take_over and not decode:
            able = [engine for engine in prefill if self._fleet.engines[engine.name].takes(most)]
        if able:
            engine = self._choose_prefill(prompt, able, now)
            return Route(engine, engine)
        if prefill and prompt.request.params.pooling is not None:  # no token follows
            engine = self._prefill_of(prompt, prefill, now)
            return Route(engine, engine)
        for side, candidates in zip(SIDES, (prefill, decode), strict=True):
            if not candidates:
                raise NoEngine(f"no {side} engine is ready")
        first = self._prefill_of(prompt, prefill, now)
        if self._fleet.engines[first].role == "any":
            return Route(first, first)
        is_foreign = not self._fleet.has_reader(self._fleet.engines[first], "decode")
        if is_foreign and self._fleet.engines[first].takes(most):
            return Route(first, first)  # as any engine can: no other engine could read its KV
        if is_foreign or (self._fleet.engines[first].lacks_store and not prompt.request.probe):
            alone = self.choose_decode(prompt, first, now, without=without)
            return Route(
                alone, alone
            )  # a hand-off would gain nothing: the decode engine would compute the prompt again
        offer = self._holdings.find_offer(prompt, first, now)
        if may_stay and (one := self._stay(prompt, first, offer, decode, now)) is not None:
            return Route(one, one)
        order = self._order(first, decode[0].name)
        if order == "prefill_first":
            return Route(first, "", order, offer)
        return Route(first, self.choose_decode(prompt, first, now, without=without), order, offer)

    def _stay(
        self, prompt: PromptKV, prefill: str, offer: Offer | None, decode: Sequence[EngineView], now: float
    ) -> str | None:
        """The engine that runs all of the request, if that is sooner than a hand-off: the decode engine that the policy
        chooses, or, where all of these are full, the prefill engine.
        """
        request = prompt.request
        if self._local_turns == "never" or self.policy is not prefix_aware or request.probe or request.near == prefill:
            return None
        has_run_it = any(request.near == engine.name for engine in decode)  # for an earlier choice
        chosen = request.near if has_run_it else self._choose(prompt, "decode", decode, self._decode_turn, prefill, now)
        num_tokens = len(request.prompt_token_ids)
        num_lacking = max(num_tokens - prompt.cached.get(chosen, 0), 1)
        is_asked_for = has_run_it or (self._local_turns == "always" and 2 * num_lacking <= num_tokens)
        if is_asked_for or self._is_sooner(prompt, chosen, num_lacking, prefill, offer, now):
            self.num_local_turns += 1
            prompt.stays = "local"
            return chosen
        if self._keeps(prompt, prefill, decode, now):
            self.num_kept += 1
            prompt.stays = "kept"
            return prefill
        return None

    def _is_sooner(
        self, prompt: PromptKV, decode: str, num_lacking: int, prefill: str, offer: Offer | None, now: float
    ) -> bool:
        """Whether `decode` would compute this many tokens sooner than `prefill` would compute what it lacks and hand it
        over. Computing on the decode engine holds up everything that it runs, and half of that time each request that
        comes meanwhile. If nothing has been measured, prefill is used.
        """
        speeds, here, there = self._fleet.speeds, self._fleet.engines[decode], self._fleet.engines[prefill]
        token_s = speeds.token_s(prefill)
        if not token_s:
            return False
        own_s = (here.tokens_left(now) + num_lacking) * (speeds.token_s(decode) or token_s)
        arrivals = own_s / self._gap_s / len(self._fleet.sides["decode"]) if self._gap_s else 0.0
        here_s = own_s * (1 + here.books.requests + arrivals / 2)
        num_computed = there.tokens_left(now) + self._holdings.uncached_tokens(prompt, prefill, offer)
        there_s = num_computed * token_s + self._holdings.handoff_s(prefill, decode, num_lacking)
        self._record_stay(prompt, decode, num_lacking, here_s, prefill, num_computed, there_s)
        return here_s < there_s

    def _keeps(self, prompt: PromptKV, prefill: str, decode: Sequence[EngineView], now: float) -> bool:
        """Whether the prefill engine would be done sooner with all of it than decode engines, the least loaded of
        which has no room for it: each token may wait for a step of prompts there.
        """
        fleet, request, need = self._fleet, prompt.request, kv_tokens(prompt.request)
        first, last = fleet.engines[prefill], min(decode, key=lambda e: e.load).name
        books, token_s = fleet.engines[last].books, fleet.speeds.token_s(prefill)
        over = books.kv_tokens + need - fleet.engines[last].kv_capacity
        if over <= 0 or not token_s or not first.takes(request.most_tokens(0)):
            return False
        num_output = expected_output(request.params.max_tokens)
        step_s = fleet.speeds.step_s(last, books.requests)
        if not step_s:
            return False
        here_s = num_output * min(first.tokens_left(now), first.largest_step) * token_s
        wait_s = num_output * step_s * over / max(books.kv_tokens, over)
        there_s = wait_s + self._holdings.handoff_s(prefill, last, len(request.prompt_token_ids))
        self._record_stay(prompt, prefill, 0, here_s, last, over, there_s)
        return here_s < there_s

    def _record_stay(
        self, prompt: PromptKV, one: str, num_tokens: int, one_s: float, other: str, num_others: int, other_s: float
    ) -> None:
        """Record the choice between one engine and a hand-off, if it is asked for."""
        if prompt.choices is not None:
            ways = [(one, num_tokens, one_s), (other, num_others, other_s)]
            candidates = [Candidate(name, 0, 1.0, num, 0, predicted_s=seconds) for name, num, seconds in ways]
            chosen = one if one_s < other_s else other
            size = len(prompt.request.prompt_token_ids)
            prompt.choices.append(Choice("both", self.policy_name, chosen, "sooner", size, candidates))

    def has_engine(self, side: Side, now: float, without: Collection[str]) -> bool:
        """Whether an engine outside `without` is ready for this side."""
        return bool(self._candidates(side, now, without))

    def reads_parts(self, engine: str) -> bool:
        """Whether an engine takes hand-offs of a prompt's parts."""
        card = self._fleet.engines[engine].card
        return card is not None and card.reads_parts

    def can_go_on(self, side: Side, now: float, without: Collection[str]) -> bool:
        """Whether a request that loses its engine of this side has another one, or one of the other side that takes
        over.
        """
        sides = SIDES if self._take_over else (side,)
        return any(self.has_engine(side, now, without) for side in sides)

    def _prefill_of(self, prompt: PromptKV, engines: Sequence[EngineView], now: float) -> str:
        self._num_prefill = len(engines)
        return self._choose_prefill(prompt, prefer(engines, prompt.request.affinity), now)

    def choose_decode(self, prompt: PromptKV, prefill: str, now: float, *, without: Collection[str] = ()) -> str:
        """The engine that decodes the request of which `prefill` runs or ran the prompt; engines that recently failed
        to load from it come last.

        Raises:
            NoEngine: no engine that decodes is ready.
        """
        engines = self._candidates("decode", now, {*without, prefill}, prompt, prefill)
        if not engines:
            raise NoEngine("no decode engine is ready")
        failing, can_read = self._fleet.pairs.avoided(now), self._fleet.can_hand_over
        engines = [
            e for e in engines if (prefill, e.name) not in failing and can_read(prefill, e.name)
        ] or engines  # fmt: skip
        # Without the shift, both sides' turns would advance together: of 2 x 2 pairs only two would ever be used.
        turn = self._decode_turn + self._decode_turn // math.lcm(self._num_prefill, len(engines))
        self._decode_turn += 1
        return self._choose(prompt, "decode", engines, turn, prefill, now)

    def _order(self, prefill: str, decode: str) -> Order:
        """The hand-off order of the two. Raises EngineUnavailable if they have none in common."""
        try:
            return self._fleet.order(prefill, decode, self._orders)
        except IncompatiblePeers as error:
            raise EngineUnavailable(str(error)) from error

    def _candidates(
        self, side: Side, now: float, without: Collection[str], prompt: PromptKV | None = None, prefill: str = ""
    ) -> list[EngineView]:
        """Usable engines; the fleet leaves out those in `without` only if others remain. Of many engines, few are
        looked at for a prompt, unless the policy is to know all of them.
        """
        near: Collection[str] | None = ()
        if prompt is not None:
            sees_all = self.policy not in BY_LOAD or prompt.request.affinity or len(self._fleet.sides[side]) <= MANY
            near = None if sees_all else {*prompt.near, prompt.request.near}
        engines = self._fleet.candidates(side, now, without=without, near=near, prefill=prefill)
        return [engine for engine in engines if engine.name not in without]

    def _choose(
        self, prompt: PromptKV, side: Side, engines: Sequence[EngineView], turn: int, prefill: str, now: float
    ) -> str:
        """Choose by policy; by the default one if that fails, which costs no request. `prefill`: of a decode side."""
        names, request = [engine.name for engine in engines], prompt.request
        if side == "prefill":
            match = functools.cache(lambda: self._holdings.worth(prompt, names, now))
        else:
            match = functools.cache(lambda: self._spared(prompt, prefill, names))
        predict = functools.cache(lambda: self._predict(prompt, side, engines, match()))
        seed = self._rng.getrandbits(32) if prompt.choices is not None else 0
        rng = self._rng if prompt.choices is None else random.Random(seed)
        size = len(request.prompt_token_ids)
        snapshot = Snapshot(tuple(engines), turn, rng, match, side, size, predict)
        slo_s = request.slo_ttft_s if side == "prefill" else request.slo_tpot_s
        near = request.near if side == "prefill" else ""
        name, reason = self._decide(snapshot, near, slo_s)
        if prompt.choices is not None:
            policy = DEFAULT_POLICY if reason == "default" else self.policy_name
            told = [self._describe(prompt, side, engine, snapshot, prefill) for engine in engines]
            prompt.choices.append(Choice(side, policy, name, reason, size, told, turn, seed, near, slo_s))
        return name

    def _decide(self, snapshot: Snapshot, near: str, slo_s: float) -> tuple[str, Reason]:
        """The chosen engine, and why."""
        if near and any(near == engine.name for engine in snapshot.engines):
            return near, "sibling"
        if slo_s and (cheapest := cheapest_within(snapshot, slo_s)) is not None:
            return cheapest.name, "objective"
        try:
            return apply_policy(self.policy, snapshot), "policy"
        except Exception:
            self.num_policy_failures += 1
            if self._log_limit.passes():
                logger.exception("the policy failed, and %s chose in its place", DEFAULT_POLICY)
            return apply_policy(POLICIES[DEFAULT_POLICY], snapshot), "default"

    def _describe(
        self, prompt: PromptKV, side: Side, engine: EngineView, snapshot: Snapshot, prefill: str
    ) -> Candidate:
        """A candidate as the policy saw it, for the record."""
        name, own = engine.name, prompt.cached.get(engine.name, 0)
        token_s, transfer_s = self._fleet.speeds.token_s(name), None
        if side == "prefill":
            reach = max((r.num_tokens for r in prompt.reaches if name in r.engines), default=0)
            own = max(own, prompt.expected(name), reach)
        elif prefill:
            transfer_s = self._holdings.handoff_s(prefill, name, snapshot.num_tokens - own) or None
        return Candidate(
            name, engine.load, engine.pace, max(snapshot.num_tokens - own, 1), snapshot.match().get(name, 0),
            max(engine.load, 0) * token_s if side == "prefill" and token_s else None, transfer_s,
            snapshot.predict().get(name),
        )  # fmt: skip

    def _spared(self, prompt: PromptKV, prefill: str, engines: Sequence[str]) -> Mapping[str, int]:
        """Tokens of KV that need not be handed over to each of these, less those that cost their steps as much as it
        takes to hand over the others.
        """
        token_s = self._fleet.speeds.token_s(prefill) if prefill else None
        if not token_s or not self._fleet.speeds.knows_loads:
            return prompt.cached
        kv_token_s = token_s * self._fleet.engines[prefill].context_weight
        size = len(prompt.request.prompt_token_ids)
        lacking = {name: size - prompt.cached.get(name, 0) for name in engines}
        handoff_s = self._holdings.handoff_s
        return {name: size - int(handoff_s(prefill, name, num) / kv_token_s) for name, num in lacking.items()}

    def _predict(
        self, prompt: PromptKV, side: Side, engines: Sequence[EngineView], match: Mapping[str, int]
    ) -> dict[str, float]:
        """Seconds that each engine would take to the first token (decode: for each further one), where known."""
        speeds, num_tokens = self._fleet.speeds, len(prompt.request.prompt_token_ids)
        predicted: dict[str, float] = {}
        for name, load, _ in engines:
            if side == "decode":
                token_s = speeds.step_s(name, self._fleet.engines[name].books.requests + 1)
                num_left = 1
            else:
                token_s = speeds.token_s(name)
                num_left = max(load, 0) + max(num_tokens - match.get(name, 0), 1)
            if token_s:
                predicted[name] = num_left * token_s
        return predicted

    def _choose_prefill(self, prompt: PromptKV, engines: Sequence[EngineView], now: float) -> str:
        self._prefill_turn += 1
        return self._choose(prompt, "prefill", engines, self._prefill_turn - 1, "", now)
