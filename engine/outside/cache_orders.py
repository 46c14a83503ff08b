"""Operators' orders about an engine's cache and the tiers below it: the pool answers at once, tiers when they can."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdkv.engine.kv.kv_cache_manager import KVCacheManager
from pdkv.engine.outside.external import ExternalKV
from pdkv.errors import StoreUnsupported, TransferTimeout
from pdkv.wire.tiers import CacheAnswer, CacheOrder, TierAnswer

POOL = "pool"
"""The tier that consists of the engine's own blocks."""

SLACK_S = 0.5
"""Seconds after which an order is answered on behalf of a tier that has not reported being late itself."""


@dataclass(slots=True)
class _Open:
    """An order that not all tiers have answered."""

    router_id: str
    deadline: float
    num_missing: int
    tiers: list[TierAnswer] = field(default_factory=list)
    known: list[str] = field(default_factory=lambda: [POOL])


class CacheOrders:
    """The orders in progress. `name`: the connector's name, as in the stats."""

    def __init__(self, kv: KVCacheManager, external: ExternalKV, name: str) -> None:
        self._kv = kv
        self._external = external
        self._name = name
        self._open: dict[str, _Open] = {}

    @property
    def deadline(self) -> float | None:
        """When the first order ends, answered or not."""
        return min((order.deadline for order in self._open.values()), default=None)

    def begin(self, router_id: str, order: CacheOrder, now: float) -> None:
        """Take an order; `take_answers` returns its results. A repeated order starts over."""
        tiers = self._external.tiers
        num_parts = 0 if tiers is None or order.tier == POOL else tiers.order(order.within(self._name))
        opened = self._open[order.order_id] = _Open(router_id, now + order.timeout_s + SLACK_S, num_parts)
        if order.tier in ("", POOL) and not (order.action in ("pin", "unpin", "prefetch") and not order.tier):
            opened.tiers.append(self._in_pool(order))

    def take_answers(self, now: float) -> Iterator[tuple[str, CacheAnswer]]:
        """(router, answer) of orders that all tiers have answered or that have timed out."""
        if not self._open:  # as after most steps
            return
        tiers = self._external.tiers
        for answer in () if tiers is None else tiers.take_answers():
            opened = self._open.get(answer.order_id)
            if opened is not None:
                told = answer.under(self._name)
                opened.tiers += told.tiers
                opened.known += told.known
                opened.num_missing -= 1
        for order_id, opened in list(self._open.items()):
            if opened.num_missing and opened.deadline > now:
                continue
            del self._open[order_id]
            if opened.num_missing:
                opened.tiers.append(
                    TierAnswer(
                        self._name, code=TransferTimeout.code, problem="some of its tiers have not answered in time"
                    )
                )
            yield opened.router_id, CacheAnswer(order_id, opened.tiers, opened.known)

    def router_left(self, router_id: str) -> None:
        """Drop the orders of a router that has left."""
        self._open = {name: opened for name, opened in self._open.items() if opened.router_id != router_id}

    def _in_pool(self, order: CacheOrder) -> TierAnswer:
        match order.action:
            case "lookup" if order.keys is not None:
                hit = self._kv.find_prefix(order.keys)
                return TierAnswer(POOL, hit.num_tokens, sum(block >= 0 for table in hit.tables for block in table))
            case "clear":
                return TierAnswer(POOL, num_values=self._kv.drop_cached(order.keys))
        return TierAnswer(
            POOL, code=StoreUnsupported.code, problem=f"{order.action} is not possible for an engine's own blocks"
        )
