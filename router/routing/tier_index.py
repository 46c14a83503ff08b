"""Which prompt prefixes lie in tiers below the engines' caches: in stores that several engines share, or in their own.

Kept from what engines say (TierEvents), as hints: what is wrong here costs a load or a computation. A tier is a table
of keys, each standing for the end of so many tokens; a match is a walk along the prompt's own keys, from end to end.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.block_keys import HASH_BLOCK_SIZE
from pdkv.wire.messages import TierEvents

MAX_TIERS = 256
"""Of all engines together; what is said of further ones is refused."""

MAX_SHARED_KEYS = 1 << 17
"""Of a tier that engines share; those told longest ago go first, as those of a tier of one engine do."""

MAX_OWN_KEYS = 1 << 14

MAX_KEYS_PER_MESSAGE = 1 << 14
"""Beyond what any engine sends: the event loop handles a message at once."""


class _Tier:
    """One tier and the engines that reach it."""

    def __init__(self, medium: str, owner: str, tokens_per_key: int) -> None:
        self.medium = medium
        self.owner = owner  # the only engine that reaches it; empty: whoever names it
        self.tokens_per_key = tokens_per_key
        self.engines: set[str] = set()
        self.keys: OrderedDict[bytes, None] = OrderedDict()

    def apply(self, events: TierEvents) -> None:
        keys = self.keys
        for key in events.removed:
            keys.pop(key, None)
        for key in events.stored:
            keys[key] = None
            keys.move_to_end(key)
        most = MAX_OWN_KEYS if self.owner else MAX_SHARED_KEYS
        while len(keys) > most:
            keys.popitem(last=False)


class TierIndex:
    """Tiers by name. A tier is forgotten with the last engine that reaches it."""

    def __init__(self, hash_block_size: int = HASH_BLOCK_SIZE) -> None:
        self.hash_block_size = hash_block_size
        self.num_refused = 0  # messages: too many tiers or keys, or cut otherwise than for the tier's other engines
        self._engines: set[str] = set()
        self._tiers: dict[tuple[str, str], _Tier] = {}  # by (medium, owner)

    def add_engine(self, engine: str) -> None:
        """The engine is there; it says itself which tiers it reaches."""
        self.remove_engine(engine)
        self._engines.add(engine)

    def apply(self, engine: str, events: TierEvents) -> bool:
        """Act on what an engine says; False: it is refused, and does not make the engine one of the tier's."""
        if engine not in self._engines:
            return True  # it has gone meanwhile
        name = (events.medium, "" if events.shared else engine)
        tier = self._tiers.get(name)
        step = events.tokens_per_key
        if step % self.hash_block_size or len(events.stored) + len(events.removed) > MAX_KEYS_PER_MESSAGE:
            return self._refuse()
        if tier is None:
            if len(self._tiers) >= MAX_TIERS:
                return self._refuse()
            tier = self._tiers[name] = _Tier(*name, step)
        elif tier.tokens_per_key != step:
            return self._refuse()
        tier.engines.add(engine)
        tier.apply(events)
        return True

    def _refuse(self) -> bool:
        self.num_refused += 1
        return False

    def remove_engine(self, engine: str) -> None:
        """The engine is gone. What it told of a shared tier stays, as long as another engine reaches it. Idempotent."""
        self._engines.discard(engine)
        for name, tier in list(self._tiers.items()):
            tier.engines.discard(engine)
            if not tier.engines:
                del self._tiers[name]

    def match(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Tokens of the longest prefix of `keys` that each engine reaches in one tier; without those of none."""
        found: dict[str, int] = {}
        for tier in self._tiers.values():
            num_tokens = self._match(tier, keys)
            if num_tokens:
                for engine in tier.engines:
                    found[engine] = max(found.get(engine, 0), num_tokens)
        return found

    def match_one(self, engine: str, keys: Sequence[bytes]) -> int:
        """Tokens of the longest prefix of `keys` that this engine reaches in one tier."""
        own = (tier for tier in self._tiers.values() if engine in tier.engines)
        return max((self._match(tier, keys) for tier in own), default=0)

    def _match(self, tier: _Tier, keys: Sequence[bytes]) -> int:
        known, step = tier.keys, tier.tokens_per_key // self.hash_block_size
        num_found = 0
        for end in range(step - 1, len(keys), step):
            if keys[end] not in known:
                break
            num_found += 1
        return num_found * tier.tokens_per_key

    def describe(self) -> list[Mapping[str, Any]]:
        """JSON-ready, a row per tier."""
        return [
            {
                "medium": tier.medium,
                "shared": not tier.owner,
                "engines": sorted(tier.engines),
                "tokens_per_key": tier.tokens_per_key,
                "keys": len(tier.keys),
            }
            for tier in self._tiers.values()
        ]
