"""Chooses the engines of a request: a snapshot per side for the policy, then an order that both engines allow."""

import math
import random
from collections.abc import Collection, Mapping, Sequence

import xxhash

from pdkv.block_keys import HASH_BLOCK_SIZE, root_key
from pdkv.config import Reuse
from pdkv.errors import EngineUnavailable, IncompatiblePeers, NoEngine
from pdkv.router.engines.fleet import Fleet
from pdkv.router.generations.request import GenerateRequest, Offer, Route
from pdkv.router.routing.policies import EngineView, Side, Snapshot, find_policy
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.messages import Order

SIDES: tuple[Side, Side] = ("prefill", "decode")

AFFINITY_TOKENS = 4096
"""A request of a `prompt_cache_key` goes to the key's engine although so many more tokens wait there."""


LOADED_SHARE = 0.9
"""What a token that is loaded from a tier below the cache is worth, one in the cache being worth 1.

Loading 4,096 tokens of a model of 197 M parameters takes 15 to 35 ms and computing them 4.1 s (README, "Connectors");
of a small model, or from afar, it is a larger part. So an engine that has the prompt itself comes first among equally
loaded ones, and no other has to wait for it.
"""


def with_lower_tier(num_cached: int, num_reached: int) -> int:
    """What an engine need not compute, in cached tokens: so many it has, and of the prompt's first so many it loads
    those that it has not.
    """
    return num_cached + int(max(num_reached - num_cached, 0) * LOADED_SHARE)


def prefer(engines: Sequence[EngineView], key: str) -> Sequence[EngineView]:
    """The candidates with the one that belongs to `key` seeming less loaded: the same one for all of its requests.

    The choice is by rendezvous hashing: when an engine comes or goes, only the keys that it takes or had move.
    """
    if not key:
        return engines
    own = max(engines, key=lambda engine: xxhash.xxh3_64_intdigest(f"{engine.name}\0{key}".encode()))
    return [e._replace(load=e.load - AFFINITY_TOKENS) if e is own else e for e in engines]


class RouteChooser:
    """A policy over the fleet and the prefix index of one router."""

    def __init__(
        self,
        fleet: Fleet,
        index: PrefixIndex,
        tiers: TierIndex,
        *,
        policy: str,
        orders: Sequence[Order],
        rng: random.Random,
        take_over: bool = False,
        reuse: Reuse = "auto",
    ) -> None:
        """`take_over`: where no engine of one role is ready, those of the other do its work, too. `reuse`: when prefill
        reads what other engines have cached; auto: where that takes less time than computing it.

        Raises:
            ConfigError: an unknown policy.
        """
        self.policy = find_policy(policy)
        self._fleet = fleet
        self._index = index
        self._tiers = tiers
        self._orders = tuple(orders)
        self._rng = rng
        self._take_over = take_over
        self._reuse = reuse
        self._prefill_turn = 0
        self._decode_turn = 0
        self._num_prefill = 1  # candidates when one was chosen last

    def choose(self, request: GenerateRequest, now: float, *, without: Collection[str] = ()) -> Route:
        """Both sides, none of them in `without`; an aggregated engine is its own decode side.

        Where prefill goes first, decode is left open: who is free then, and lives, is known when the prompt is done.

        Raises:
            NoEngine: no engine of a role is ready.
            EngineUnavailable: the two have no order in common.
        """
        prefill, decode = (self._candidates(side, now, without) for side in SIDES)
        if self._take_over and (prefill or decode) and not (prefill and decode):
            engine = self._choose("prefill", request, prefill or decode, self._next_prefill_turn())
            return Route(engine, engine)
        for side, candidates in zip(SIDES, (prefill, decode), strict=True):
            if not candidates:
                raise NoEngine(f"no {side} engine is ready")
        first = self.choose_prefill(request, now, without=without)
        if self._fleet.engines[first].role == "any":
            return Route(first, first)
        if not any(self._fleet.can_hand_over(first, engine.name) for engine in decode):
            return Route(first, first)  # as any engine can: what it computes, nobody else could read
        order, offer = self._order(first, decode[0].name), self.find_offer(request, first, now)
        if order == "prefill_first":
            return Route(first, "", order, offer)
        return Route(first, self.choose_decode(request, first, now, without=without), order, offer)

    def find_offer(self, request: GenerateRequest, borrower: str, now: float) -> Offer | None:
        """What another engine has of the prompt, if `borrower` reads it sooner than it computes it."""
        card = self._fleet.engines[borrower].card
        if self._reuse == "never" or card is None or not card.lends:
            return None
        if request.probe or request.params.prompt_logprobs is not None:  # whose logits must be computed
            return None
        keys = self._keys(request)
        cached = self._index.match(keys)
        own = max(cached.pop(borrower, 0), self._tiers.match_one(borrower, keys))
        most = (len(request.prompt_token_ids) - 1) // HASH_BLOCK_SIZE * HASH_BLOCK_SIZE  # a token is computed
        found = sorted(((min(num, most), name) for name, num in cached.items() if min(num, most) > own), reverse=True)
        best = next((each for each in found if self._fleet.can_lend(each[1], borrower, now)), None)
        if best is None:
            return None
        num_tokens, lender = best
        layout = card.layout
        num_bytes = (num_tokens - own) * layout.token_bytes * layout.kv_heads_of_all_ranks // layout.num_kv_heads
        costs = self._fleet.speeds.costs(borrower, num_tokens - own, num_bytes)
        if self._reuse == "always":
            return Offer(lender, num_tokens)
        if not costs.prefers_load:
            return None
        return Offer(lender, num_tokens, costs.load_timeout_s, costs.compute_s or 0.0)

    def has_engine(self, side: Side, now: float, without: Collection[str]) -> bool:
        """Whether one is ready for this side that is not in `without`."""
        return bool(self._candidates(side, now, without))

    def can_go_on(self, side: Side, now: float, without: Collection[str]) -> bool:
        """Whether a request that loses its engine of this side has another one, or one of the other side takes over."""
        sides = SIDES if self._take_over else (side,)
        return any(self.has_engine(side, now, without) for side in sides)

    def choose_prefill(self, request: GenerateRequest, now: float, *, without: Collection[str] = ()) -> str:
        """Who runs the prompt; for a choice after the first the engine that ran it before, as long as it may be asked.

        Raises:
            NoEngine: no engine is ready that runs prompts.
        """
        engines = self._candidates("prefill", now, without)
        if not engines:
            raise NoEngine("no prefill engine is ready")
        self._num_prefill = len(engines)
        if any(request.near == engine.name for engine in engines):
            return request.near
        return self._choose("prefill", request, prefer(engines, request.affinity), self._next_prefill_turn())

    def choose_decode(
        self, request: GenerateRequest, prefill: str, now: float, *, without: Collection[str] = ()
    ) -> str:
        """Who decodes what `prefill` runs or ran; engines that failed to load from it lately come last.

        Raises:
            NoEngine: no engine is ready that decodes.
        """
        engines = self._candidates("decode", now, {*without, prefill})
        if not engines:
            raise NoEngine("no decode engine is ready")
        marked = self._fleet.avoided_pairs(now)
        if marked:
            engines = [e for e in engines if (prefill, e.name) not in marked] or engines
        # Without the shift both sides' turns would go round together: of 2 x 2 pairs only two would ever be used.
        turn = self._decode_turn + self._decode_turn // math.lcm(self._num_prefill, len(engines))
        self._decode_turn += 1
        return self._choose("decode", request, engines, turn)

    def _order(self, prefill: str, decode: str) -> Order:
        """How the two hand over. Raises EngineUnavailable where they have no order in common."""
        try:
            return self._fleet.order(prefill, decode, self._orders)
        except IncompatiblePeers as error:
            raise EngineUnavailable(str(error)) from error

    def _next_prefill_turn(self) -> int:
        self._prefill_turn += 1
        return self._prefill_turn - 1

    def uncached_tokens(self, request: GenerateRequest, engine: str, offer: Offer | None = None) -> int:
        """Prompt tokens that the engine will have to compute, as far as is known, those that it loads from a tier or
        from another engine for the time that they take; a block at least.
        """
        keys = self._keys(request)
        reached = max(self._tiers.match_one(engine, keys), 0 if offer is None else offer.num_tokens)
        cached = with_lower_tier(self._index.match_one(engine, keys), reached)
        return max(len(request.prompt_token_ids) - cached, HASH_BLOCK_SIZE)

    def _candidates(self, side: Side, now: float, without: Collection[str]) -> list[EngineView]:
        """Engines that may be asked; the fleet passes over those in `without` only where others are left."""
        engines = self._fleet.candidates(side, now, without=tuple(without))
        return [engine for engine in engines if engine.name not in without]

    def _choose(self, side: Side, request: GenerateRequest, engines: Sequence[EngineView], turn: int) -> str:
        return self.policy(Snapshot(engines, turn, self._rng, lambda: self._match(side, request))).name

    def _match(self, side: Side, request: GenerateRequest) -> Mapping[str, int]:
        """Prompt tokens that are not computed, by engine. (On the decode side none are: only its own blocks count.)"""
        keys = self._keys(request)
        cached = self._index.match(keys)
        if side == "prefill":
            for engine, num_tokens in self._tiers.match(keys).items():
                cached[engine] = with_lower_tier(cached.get(engine, 0), num_tokens)
        return cached

    def _keys(self, request: GenerateRequest) -> Sequence[bytes]:
        """Of the prompt's full blocks."""
        card = self._fleet.cards()[0]  # what keys depend on is the same in all
        root = root_key(model=card.model, layout=card.layout.identity, cache_salt=request.cache_salt)
        return request.keys.of(root, request.prompt_token_ids)
