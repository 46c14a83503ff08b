"""A router's choice of engines over a fleet that nobody runs, and what its engines say of their KV."""

import random
from collections.abc import Sequence
from typing import Any

from scripted_engine import make_card

from pdkv.base.block_keys import extend_keys, root_key
from pdkv.config import LocalTurns, Reuse
from pdkv.router.engines.books import Entry
from pdkv.router.engines.fleet import ORDERS, Fleet
from pdkv.router.request import GenerateRequest, Offer, Route
from pdkv.router.routing.holdings import Holdings
from pdkv.router.routing.prefix_index import PrefixIndex
from pdkv.router.routing.route_chooser import RouteChooser
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.messages import BlockStored, CacheCleared, KVEvents
from pdkv.wire.tiers import TierEvents


class ChooserRig:
    """A fleet, and all that a router knows of it. `card`: fields of its engines' cards."""

    def __init__(
        self,
        num_prefill: int,
        num_decode: int,
        policy: str = "round_robin",
        role: str = "decode",
        *,
        reuse: Reuse = "auto",
        local_turns: LocalTurns = "auto",
        **card: Any,
    ) -> None:
        self.fleet, self.index, self.tiers = Fleet(), PrefixIndex(), TierIndex()
        self.holdings = Holdings(self.fleet, self.index, self.tiers, reuse)
        self.chooser = RouteChooser(
            self.fleet, self.holdings,
            policy=policy, orders=ORDERS, rng=random.Random(0), local_turns=local_turns,
        )  # fmt: skip
        for kind, num in (("prefill", num_prefill), (role, num_decode)):
            for i in range(num):
                self.start(f"{kind}-{i}", **card)

    def start(self, name: str, **card: Any) -> None:
        """A new incarnation of an engine; its name says its role."""
        role = name[:-2]
        if name not in self.fleet.engines:
            self.fleet.add(name, role)
            self.index.add_engine(name)
            self.tiers.add_engine(name)
        self.fleet.came_up(name, make_card(name, role, **({"max_model_len": 1 << 20} | card)))

    def keys_of(self, engine: str, num_tokens: int, request: GenerateRequest) -> list[bytes]:
        """Block keys of the prompt's first tokens."""
        card = self.fleet.engines[engine].card
        assert card is not None
        keys: list[bytes] = []
        root = root_key(model=card.model, layout=card.layout.identity, cache_salt=request.cache_salt)
        extend_keys(keys, root, request.prompt_token_ids[:num_tokens])
        return keys

    def store(self, engine: str, num_tokens: int, request: GenerateRequest) -> None:
        """The engine says that it has the beginning of the prompt."""
        keys = self.keys_of(engine, num_tokens, request)
        assert self.index.apply(engine, KVEvents(0, [CacheCleared(), BlockStored(keys, None)]))

    def reach(self, engines: Sequence[str], num_tokens: int, request: GenerateRequest, **tier: Any) -> None:
        """The beginning of the prompt lies in a store that these engines reach, in values of 64 tokens."""
        keys = self.keys_of(engines[0], num_tokens, request)
        for engine in engines:
            assert self.tiers.apply(engine, TierEvents("disk", True, 64, stored=keys[3::4], **tier))

    def choose(self, request: GenerateRequest, now: float = 0.0, **options: Any) -> Route:
        return self.chooser.choose(self.holdings.of(request, now), now, **options)

    def choose_prefill(self, request: GenerateRequest, now: float = 0.0, **options: Any) -> str:
        engines = self.chooser._candidates("prefill", now, options.get("without", ()))
        return self.chooser._prefill_of(self.holdings.of(request, now), engines, now)

    def choose_decode(self, request: GenerateRequest, prefill: str, now: float = 0.0) -> str:
        return self.chooser.choose_decode(self.holdings.of(request, now), prefill, now)

    def uncached_tokens(self, request: GenerateRequest, engine: str, offer: Offer | None = None) -> int:
        return self.holdings.uncached_tokens(self.holdings.of(request, 0.0), engine, offer)

    def find_offer(self, request: GenerateRequest, borrower: str, now: float = 0.0) -> Offer | None:
        return self.holdings.find_offer(self.holdings.of(request, now), borrower, now)

    def occupy(self, engine: str, *, prompts: int = 0, kv: int = 0) -> None:
        """The engine has so many tokens of a request to compute, and to hold."""
        Entry(self.fleet.engines[engine].books, prompts, kv).enter()
