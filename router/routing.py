"""Chooses the engines of a request: a snapshot per side for the policy, then an order that both engines allow."""

import math
import random
from collections.abc import Mapping, Sequence

import xxhash

from pdkv.block_keys import HASH_BLOCK_SIZE, root_key
from pdkv.errors import EngineUnavailable, IncompatiblePeers
from pdkv.router.policies import EngineView, Side, Snapshot, find_policy
from pdkv.router.prefix_index import PrefixIndex
from pdkv.router.request import GenerateRequest, Route
from pdkv.router.state import Fleet
from pdkv.wire.messages import Order

AFFINITY_TOKENS = 4096
"""A request of a `prompt_cache_key` goes to the key's engine although so many more tokens wait there."""


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
        self, fleet: Fleet, index: PrefixIndex, *, policy: str, orders: Sequence[Order], rng: random.Random
    ) -> None:
        """Raises ConfigError for an unknown policy."""
        self.policy = find_policy(policy)
        self._fleet = fleet
        self._index = index
        self._orders = tuple(orders)
        self._rng = rng
        self._prefill_turn = 0
        self._decode_turn = 0
        self._num_prefill = 1  # candidates when one was chosen last

    def choose(self, request: GenerateRequest, now: float, *, without: Sequence[str] = ()) -> Route:
        """Both sides, if possible without the engines in `without`; an aggregated engine is its own decode side.

        Raises:
            EngineUnavailable: no engine of a role is ready, or the two have no order in common.
        """
        prefill = self.choose_prefill(request, now, without=without)
        if self._fleet.engines[prefill].role == "any":
            return Route(prefill, prefill)
        return self.route(prefill, self.choose_decode(request, prefill, now, without=without))

    def choose_prefill(self, request: GenerateRequest, now: float, *, without: Sequence[str] = ()) -> str:
        """Who runs the prompt; for a choice after the first the engine that ran it before, as long as it may be asked.

        Raises:
            EngineUnavailable: no engine is ready that runs prompts.
        """
        engines = self._candidates("prefill", now, without)
        self._num_prefill = len(engines)
        if any(request.near == engine.name for engine in engines):
            return request.near
        self._prefill_turn += 1
        return self._choose(request, prefer(engines, request.affinity), self._prefill_turn - 1)

    def choose_decode(self, request: GenerateRequest, prefill: str, now: float, *, without: Sequence[str] = ()) -> str:
        """Who decodes what `prefill` runs or ran; engines that failed to load from it lately come last.

        Raises:
            EngineUnavailable: no engine is ready that decodes.
        """
        engines = self._candidates("decode", now, without)
        marked = self._fleet.pairs.avoided(now)
        if marked:
            engines = [e for e in engines if (prefill, e.name) not in marked] or engines
        # Without the shift both sides' turns would go round together: of 2 x 2 pairs only two would ever be used.
        turn = self._decode_turn + self._decode_turn // math.lcm(self._num_prefill, len(engines))
        self._decode_turn += 1
        return self._choose(request, engines, turn)

    def route(self, prefill: str, decode: str) -> Route:
        """The two as a route. Raises EngineUnavailable where they have no order in common."""
        if prefill == decode:
            return Route(prefill, decode)
        try:
            return Route(prefill, decode, self._fleet.order(prefill, decode, self._orders))
        except IncompatiblePeers as error:
            raise EngineUnavailable(str(error)) from error

    def uncached_tokens(self, request: GenerateRequest, engine: str) -> int:
        """Prompt tokens that the engine will have to compute, as far as the index knows; a block at least."""
        cached = self._index.match_one(engine, self._keys(request))
        return max(len(request.prompt_token_ids) - cached, HASH_BLOCK_SIZE)

    def _candidates(self, side: Side, now: float, without: Sequence[str]) -> list[EngineView]:
        engines = self._fleet.candidates(side, now, without=without)
        if not engines:
            raise EngineUnavailable(f"no {side} engine is ready")
        return engines

    def _choose(self, request: GenerateRequest, engines: Sequence[EngineView], turn: int) -> str:
        return self.policy(Snapshot(engines, turn, self._rng, lambda: self._match(request))).name

    def _match(self, request: GenerateRequest) -> Mapping[str, int]:
        """Cached prompt tokens by engine."""
        return self._index.match(self._keys(request))

    def _keys(self, request: GenerateRequest) -> Sequence[bytes]:
        """Of the prompt's full blocks."""
        card = self._fleet.cards()[0]  # what keys depend on is the same in all
        root = root_key(model=card.model, layout=card.layout.identity, cache_salt=request.cache_salt)
        return request.keys.of(root, request.prompt_token_ids)
