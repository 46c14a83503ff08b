"""Chooses the engines of a request: a snapshot per side for the policy, then an order that both engines allow."""

import functools
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence

import xxhash

from pdkv.base.log_limit import LogLimit
from pdkv.config import LocalTurns
from pdkv.errors import EngineUnavailable, IncompatiblePeers, NoEngine
from pdkv.router.engines.candidate import EngineView, Side
from pdkv.router.engines.fleet import Fleet
from pdkv.router.request import Offer, Route
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

SIDES: tuple[Side, Side] = ("prefill", "decode")

AFFINITY_TOKENS = 4096
"""Additional tokens that may wait on the engine of a `prompt_cache_key` before its request goes elsewhere."""


MAX_LOCAL_TOKENS = 256
"""Prompt tokens that a decode engine may lack; if it lacks more, prefill is used, whatever the cost."""

LOCAL_FRACTION = 0.25
"""That limit as a share of the prompt: a conversation's next turn goes to its KV, not a whole prompt to an idle
decode engine.
"""


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
        """`take_over`: if no engine of one role is ready, those of the other do its work, too. `local_turns`: whether a
        decode engine that has nearly all of a prompt computes the rest itself, if that costs less.

        Raises:
            ConfigError: an unknown policy.
        """
        self.policy = find_policy(policy)
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
        self.num_local_turns = 0  # requests given to decode engines because they had nearly all of the prompt
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
            may_stay: no output has been sent yet, so the request may run where nearly all of its prompt is cached.
            num_output: output tokens so far.

        Raises:
            NoEngine: no engine of a role is ready.
            EngineUnavailable: the two have no order in common.
        """
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
        if may_stay and (local := self._find_local(prompt, first, offer, decode)) is not None:
            return Route(local, local)
        order = self._order(first, decode[0].name)
        if order == "prefill_first":
            return Route(first, "", order, offer)
        return Route(first, self.choose_decode(prompt, first, now, without=without), order, offer)

    def _find_local(
        self, prompt: PromptKV, prefill: str, offer: Offer | None, decode: Sequence[EngineView]
    ) -> str | None:
        """The decode engine that has nearly all of the prompt, if it should compute the rest itself."""
        if self._local_turns == "never" or self.policy is not prefix_aware:
            return None
        request = prompt.request
        if request.probe or request.near == prefill:
            return None
        chosen = self._choose(prompt, "decode", decode, self._decode_turn, lambda: prompt.cached)
        has_run_it = any(request.near == engine.name for engine in decode)  # for an earlier choice
        if has_run_it:
            chosen = request.near
        num_tokens = len(request.prompt_token_ids)
        num_lacking = max(num_tokens - prompt.cached.get(chosen, 0), 1)
        if num_lacking > min(MAX_LOCAL_TOKENS, num_tokens * LOCAL_FRACTION):
            return None
        is_asked_for = self._local_turns == "always" or has_run_it
        if not (is_asked_for or self._is_sooner(num_lacking, chosen, prompt, prefill, offer)):
            return None
        self.num_local_turns += 1
        return chosen

    def _is_sooner(self, num_lacking: int, decode: str, prompt: PromptKV, prefill: str, offer: Offer | None) -> bool:
        """Whether `decode` would compute this many tokens sooner than `prefill` would compute what it lacks and hand it
        over. Computing on the decode engine holds up everything it runs; if nothing has been measured, prefill is used.
        """
        token_s = self._fleet.speeds.token_s(prefill)
        if token_s is None:
            return False
        here_s = num_lacking * token_s * (1 + self._fleet.engines[decode].books.requests)
        num_waiting = self._fleet.engines[prefill].books.prefill_tokens
        num_computed = num_waiting + self._holdings.uncached_tokens(prompt, prefill, offer)
        return here_s < num_computed * token_s + self._holdings.handoff_s(decode, num_lacking)

    def has_engine(self, side: Side, now: float, without: Collection[str]) -> bool:
        """Whether an engine outside `without` is ready for this side."""
        return bool(self._candidates(side, now, without))

    def can_go_on(self, side: Side, now: float, without: Collection[str]) -> bool:
        """Whether a request that loses its engine of this side has another one, or one of the other side that takes
        over.
        """
        sides = SIDES if self._take_over else (side,)
        return any(self.has_engine(side, now, without) for side in sides)

    def _prefill_of(self, prompt: PromptKV, engines: Sequence[EngineView], now: float) -> str:
        request = prompt.request
        self._num_prefill = len(engines)
        if any(request.near == engine.name for engine in engines):
            return request.near
        return self._choose_prefill(prompt, prefer(engines, request.affinity), now)

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
        return self._choose(prompt, "decode", engines, turn, lambda: prompt.cached)

    def _order(self, prefill: str, decode: str) -> Order:
        """The hand-off order of the two. Raises EngineUnavailable if they have none in common."""
        try:
            return self._fleet.order(prefill, decode, self._orders)
        except IncompatiblePeers as error:
            raise EngineUnavailable(str(error)) from error

    def _next_prefill_turn(self) -> int:
        self._prefill_turn += 1
        return self._prefill_turn - 1

    def _candidates(
        self, side: Side, now: float, without: Collection[str], prompt: PromptKV | None = None, prefill: str = ""
    ) -> list[EngineView]:
        """Usable engines; the fleet leaves out those in `without` only if others remain. Of many engines, few are
        looked at for a prompt, unless the policy is to know all of them.
        """
        near: Collection[str] | None = ()
        if prompt is not None:
            sees_all = self.policy not in BY_LOAD or prompt.request.affinity
            near = None if sees_all else {*prompt.near, prompt.request.near}
        engines = self._fleet.candidates(side, now, without=without, near=near, prefill=prefill)
        return [engine for engine in engines if engine.name not in without]

    def _choose(
        self,
        prompt: PromptKV,
        side: Side,
        engines: Sequence[EngineView],
        turn: int,
        match: Callable[[], Mapping[str, int]],
    ) -> str:
        """Choose by policy; by the default one if that fails, which costs no request. `match`: prompt tokens that need
        not be computed, by engine. (On the decode side there are none: only its own blocks count.)
        """
        match = functools.cache(match)
        predict = functools.cache(lambda: self._predict(prompt, side, engines, match()))
        num_tokens = len(prompt.request.prompt_token_ids)
        snapshot = Snapshot(tuple(engines), turn, self._rng, match, side, num_tokens, predict)
        slo_s = prompt.request.slo_ttft_s if side == "prefill" else prompt.request.slo_tpot_s
        if slo_s and (cheapest := cheapest_within(snapshot, slo_s)) is not None:
            return cheapest.name
        try:
            return apply_policy(self.policy, snapshot)
        except Exception:
            self.num_policy_failures += 1
            if self._log_limit.passes():
                logger.exception("the policy failed, and %s chose in its place", DEFAULT_POLICY)
            return apply_policy(POLICIES[DEFAULT_POLICY], snapshot)

    def _predict(
        self, prompt: PromptKV, side: Side, engines: Sequence[EngineView], match: Mapping[str, int]
    ) -> dict[str, float]:
        """Seconds that each engine would take to the first token (decode: for each further one), where known."""
        speeds, num_tokens = self._fleet.speeds, len(prompt.request.prompt_token_ids)
        predicted: dict[str, float] = {}
        for name, load in engines:
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
        names = [engine.name for engine in engines]
        worth = functools.partial(self._holdings.worth, prompt, names, now)
        return self._choose(prompt, "prefill", engines, self._next_prefill_turn(), worth)
