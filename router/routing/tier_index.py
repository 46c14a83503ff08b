"""An index of the prompt prefixes in tiers below the engines' caches: in stores that several engines share, or in their
own.

It is kept from engines' reports (TierEvents) as hints: an error costs a load or a computation. A tier is a table of
keys, each standing for the end of so many tokens; a match is a walk along the prompt's own keys, from end to end.

A tier may consist of several stores, the fastest first, which keep the values used last. Evictions are not reported, so
a value is assumed to be in the first part with room for all values stored since.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.wire.tiers import TierEvents, TierPart

MAX_TIERS = 256
"""The most tiers of all engines together; further ones are refused."""

MAX_SHARED_KEYS = 1 << 17
"""The most keys of a tier that engines share; the oldest are dropped first, as in a tier of one engine."""

MAX_OWN_KEYS = 1 << 14

MAX_KEYS_PER_MESSAGE = 1 << 14
"""The most keys in a message, more than any engine sends: the event loop handles a message at once."""


class Reach(NamedTuple):
    """The longest prefix of a prompt that lies in one tier."""

    engines: Collection[str]  # engines that reach it
    tokens_per_value: int
    value_bytes: int  # bytes that a rank reads for a value; 0: not known
    num_values: int
    runs: Sequence[tuple[str, int]]  # where values are read, and how many in a row: a name of LoadReport.connectors

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return self.num_values * self.tokens_per_value

    def values_behind(self, num_tokens: int) -> Iterator[tuple[str, int]]:
        """The parts of the tier from which the values after the first tokens are read, and how many in a row; a partly
        needed value counts.
        """
        skipped = num_tokens // self.tokens_per_value
        for part, count in self.runs:
            if count > skipped:
                yield part, count - skipped
            skipped = max(skipped - count, 0)


class _Tier:
    """One tier and the engines that reach it."""

    def __init__(self, medium: str, scope: str, owner: str, tokens_per_key: int) -> None:
        self.medium = medium
        self.scope = scope  # tells media of one name apart
        self.owner = owner  # the only engine that reaches it; empty: every engine that names it
        self.tokens_per_key = tokens_per_key
        self.engines: dict[str, Sequence[TierPart]] = {}  # the parts that each engine reports
        self.value_bytes = 0
        self.keys: OrderedDict[bytes, int] = OrderedDict()  # values that had come to the first part before each
        self._num_come = 0
        self.parts: list[TierPart] = []  # with the capacities of all engines

    def apply(self, engine: str, events: TierEvents) -> None:
        keys = self.keys
        for key in events.removed:
            keys.pop(key, None)
        room = self.parts[0].capacity if self.parts else None
        for key in events.stored:
            told = keys.get(key)
            if told is None or (room is not None and self._num_come - told > room):
                self._num_come += 1  # else it is already there, and is now the most recently used
            keys[key] = self._num_come
            keys.move_to_end(key)
        most = MAX_OWN_KEYS if self.owner else MAX_SHARED_KEYS
        while len(keys) > most:
            keys.popitem(last=False)
        self.value_bytes = events.value_bytes
        if self.engines.get(engine) != events.parts:
            self.engines[engine] = events.parts
            self._add_up()

    def leave(self, engine: str) -> None:
        if self.engines.pop(engine, None):
            self._add_up()

    def _add_up(self) -> None:
        """Add up the capacities; unknown for one engine makes it unbounded."""
        rooms: dict[str, list[int | None]] = {}
        for part in (part for parts in self.engines.values() for part in parts):
            rooms.setdefault(part.name, []).append(part.capacity)
        known = {name: [room for room in each if room is not None] for name, each in rooms.items()}
        self.parts = [TierPart(n, sum(known[n]) if len(known[n]) == len(each) else None) for n, each in rooms.items()]

    def match(self, keys: Sequence[bytes]) -> Reach:
        known, step = self.keys, self.tokens_per_key // HASH_BLOCK_SIZE
        told = list(takewhile(lambda number: number is not None, map(known.get, keys[step - 1 :: step])))
        if len(self.parts) < 2:
            runs = [(self._part_of(0), len(told))]
        else:
            parts = groupby(self._part_of(self._num_come - number) for number in told if number is not None)
            runs = [(part, sum(1 for _ in values)) for part, values in parts]
        return Reach(self.engines, self.tokens_per_key, self.value_bytes, len(told), runs)

    def _part_of(self, num_since: int) -> str:
        """The part in which a value is after this many others have come to the first part."""
        name = ""
        for part in self.parts:
            name = part.name
            if part.capacity is None or num_since < part.capacity:
                break
        return name


class TierIndex:
    """Tiers by name. A tier is forgotten with the last engine that reaches it."""

    def __init__(self) -> None:
        # refused messages: too many tiers or keys, or values of another size than the tier's other engines have
        self.num_refused = 0
        self._engines: set[str] = set()
        self._tiers: dict[tuple[str, str, str], _Tier] = {}  # by (medium, scope, owner)

    def add_engine(self, engine: str) -> None:
        """Add an engine, which will report which tiers it reaches."""
        self.remove_engine(engine)
        self._engines.add(engine)

    def apply(self, engine: str, events: TierEvents) -> bool:
        """Apply an engine's report; False: it is refused, and does not add the engine to the tier."""
        if engine not in self._engines:
            return True  # the engine has gone in the meantime
        name = (events.medium, events.scope, "" if events.shared else engine)
        tier = self._tiers.get(name)
        step = events.tokens_per_key
        if step % HASH_BLOCK_SIZE or len(events.stored) + len(events.removed) > MAX_KEYS_PER_MESSAGE:
            return self._refuse()
        if tier is None:
            if len(self._tiers) >= MAX_TIERS:
                return self._refuse()
            tier = self._tiers[name] = _Tier(*name, step)
        elif tier.tokens_per_key != step:
            return self._refuse()
        tier.apply(engine, events)
        return True

    def _refuse(self) -> bool:
        self.num_refused += 1
        return False

    def remove_engine(self, engine: str) -> None:
        """Remove the engine. Its keys in a shared tier stay as long as another engine reaches that tier. Idempotent."""
        self._engines.discard(engine)
        for name, tier in list(self._tiers.items()):
            tier.leave(engine)
            if not tier.engines:
                del self._tiers[name]

    def match(self, keys: Sequence[bytes]) -> list[Reach]:
        """The longest prefix of `keys` in each tier; tiers without any are left out."""
        reaches = (tier.match(keys) for tier in self._tiers.values())
        return [reach for reach in reaches if reach.num_values]

    def describe(self) -> list[Mapping[str, Any]]:
        """The tiers, JSON-ready, one row each."""
        return [
            {
                "medium": tier.medium,
                "scope": tier.scope,
                "shared": not tier.owner,
                "engines": sorted(tier.engines),
                "tokens_per_key": tier.tokens_per_key,
                "keys": len(tier.keys),
                "parts": [{"name": part.name, "capacity": part.capacity} for part in tier.parts],
            }
            for tier in self._tiers.values()
        ]
