"""What routers have been told about the tiers below this engine's cache, so that routers that join later can be told as
well.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from pdkv.wire.tiers import TierEvents

MAX_TIER_KEYS = 1 << 16
"""The most keys kept of one tier, the latest; routers are not told of dropped ones."""

MAX_TIERS = 16
"""The most tiers that routers are told of."""

KEYS_PER_MESSAGE = 2048
"""The most keys in one TierEvents; more are sent in parts."""


class LowerTiers:
    """The keys of each tier."""

    def __init__(self) -> None:
        self._tiers: dict[str, TierEvents] = {}  # by medium, without keys
        self._told: dict[str, OrderedDict[bytes, None]] = {}  # by medium

    def update(self, events: Iterable[TierEvents]) -> list[TierEvents]:
        """Take over a connector's report; returns the events for routers.

        Known keys are reported again: another engine may have missed them in the meantime and reported that.
        """
        return [part for event in events for part in self._update(event)]

    def _update(self, event: TierEvents) -> Iterator[TierEvents]:
        medium = event.medium
        if medium not in self._tiers:
            if len(self._tiers) >= MAX_TIERS:
                return
            self._tiers[medium] = msgspec.structs.replace(event, removed=[], stored=[])
            self._told[medium] = OrderedDict()
        told = self._told[medium]
        for key in event.removed:
            told.pop(key, None)
        for key in event.stored:  # `update` of an ordered dictionary takes twice as long
            told[key] = None
            told.move_to_end(key)
        while len(told) > MAX_TIER_KEYS:
            told.popitem(last=False)
        yield from _parts(self._tiers[medium], event.removed, event.stored)

    def snapshot(self) -> list[TierEvents]:
        """Everything reported so far; for each tier at least its existence."""
        return [part for medium, tier in self._tiers.items() for part in _parts(tier, [], list(self._told[medium]))]


def _parts(tier: TierEvents, removed: Sequence[bytes], stored: Sequence[bytes]) -> Iterator[TierEvents]:
    for start in range(0, max(len(removed), len(stored), 1), KEYS_PER_MESSAGE):
        part = slice(start, start + KEYS_PER_MESSAGE)
        yield msgspec.structs.replace(tier, removed=list(removed[part]), stored=list(stored[part]))
