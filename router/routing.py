"""Chooses the route of a request: a snapshot for the policy, then an order that both engines allow."""

import random
from collections.abc import Mapping, Sequence

from pdkv.block_keys import extend_keys, root_key
from pdkv.errors import EngineUnavailable, IncompatiblePeers
from pdkv.router.policies import Snapshot, find_policy
from pdkv.router.prefix_index import PrefixIndex
from pdkv.router.request import GenerateRequest, Route
from pdkv.router.state import Fleet
from pdkv.wire.messages import Order


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
        self._turn = 0

    def choose(self, request: GenerateRequest, now: float, *, without: Sequence[str] = ()) -> Route:
        """A route for the request, if possible without the engines in `without`.

        Raises:
            EngineUnavailable: no engine of a role is ready, or the two have no order in common.
        """
        prefill = self._fleet.candidates(("prefill", "any"), now, without=without)
        decode = self._fleet.candidates(("decode", "any"), now, without=without)
        if not prefill or not decode:
            raise EngineUnavailable(f"no {'decode' if prefill else 'prefill'} engine is ready")
        snapshot = Snapshot(
            prefill=prefill,
            decode=decode,
            num_prompt_tokens=len(request.prompt_token_ids),
            turn=self._turn,
            rng=self._rng,
            match=lambda: self._match(request),
            marked=self._fleet.marked_pairs(now),
        )
        self._turn += 1
        first, second = self.policy(snapshot)
        if first == second:
            return Route(first, second)
        try:
            return Route(first, second, self._fleet.order(first, second, self._orders))
        except IncompatiblePeers as error:
            raise EngineUnavailable(str(error)) from error

    def _match(self, request: GenerateRequest) -> Mapping[str, int]:
        """Cached prompt tokens by engine."""
        card = self._fleet.cards()[0]  # what keys depend on is the same in all
        root = root_key(model=card.model, layout=card.layout.identity, cache_salt=request.cache_salt)
        keys: list[bytes] = []
        extend_keys(keys, root, request.prompt_token_ids)
        return self._index.match(keys)
