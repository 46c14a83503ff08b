"""An index of which engine has which prompt prefix in its cache, kept from the engines' numbered KV events.

A block key is a hash of the whole prefix up to it, so the radix tree needs no nodes: a table from key to the engines
that hold it, as a bit mask, is the tree, and a match is a walk along the prompt's own keys. Engines whose layers all
have a window need only the end of a prefix, and soon hold nothing else: their match is the last place where enough
consecutive keys end.

No single call takes long, whatever an engine holds. An engine that dies or starts over loses its bit: from then on it
matches nothing, and `work` clears the bit from the table slice by slice before another engine gets it. Events of more
than a few keys wait for `work`, too. The table is cut into shards, so that none grows, or is cleared, in one go.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.router.routing.expected import ExpectedKV
from pdkv.wire.kv import KVLayout
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared, KVEvent, KVEvents

SLICE_KEYS = 2048
"""Keys that one call of `work` handles: two milliseconds."""

INLINE_KEYS = 256
"""Most keys of events that are applied as they arrive, if none wait before them."""

TURN_BITS = 17
"""Engines by which those advance that are named first for what they hold."""

_NUM_SHARDS = 1024
_SHARD_MASK = _NUM_SHARDS - 1
_SHARD_SHIFT = 40  # of the key's hash: its low bits choose the place within a dict

_MAX_WAITING_KEYS = 1 << 16
"""Keys whose events may wait, beyond twice the cache's capacity; an engine that reports more is asked to resync."""


class _Part:
    """One engine's part of the index."""

    __slots__ = (
        "asked", "bit", "done", "max_keys", "name", "next_number", "num_keys", "num_needed", "num_waiting", "waiting",
    )  # fmt: skip

    def __init__(self, name: str, bit: int, max_keys: int, num_needed: int) -> None:
        self.name = name
        self.bit = bit
        self.max_keys = max_keys
        self.num_needed = num_needed  # consecutive keys that make a hit; 0: all from the first one on
        self.num_keys = 0
        self.next_number: int | None = None  # None: nothing counts until a batch begins with CacheCleared
        self.asked = False  # a Resync is in progress
        self.waiting: deque[KVEvent] = deque()
        self.done = 0  # keys of the first of them that have been handled
        self.num_waiting = 0  # keys of all of them


class PrefixIndex:
    """Keys by engine. Memory is one table entry per distinct key."""

    def __init__(self, hash_block_size: int = HASH_BLOCK_SIZE, *, on_work: Callable[[], None] | None = None) -> None:
        """`on_work` is called when `work` has something to do again, and must arrange for `work` to be called."""
        self.hash_block_size = hash_block_size
        self.expected = ExpectedKV()
        self.num_gaps = 0
        self.num_excess_keys = 0  # keys that engines reported beyond what their cache can hold
        self._on_work = on_work
        self._is_due = False  # it was called, and `work` has something to do since
        self._parts: dict[str, _Part] = {}
        self._by_bit: dict[int, str] = {}  # engines by their bit number
        self._live = 0  # bits of engines
        self._windowed: dict[int, int] = {}  # bits of those that need only a prefix's end, by how many keys of it
        self._used = 0  # bits of removed parts, until cleared from all shards
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_NUM_SHARDS)]  # key -> bit mask of engines
        self._behind: deque[_Part] = deque()  # parts with waiting events
        self._gone: dict[int, int] = {}  # bit -> shards from which it has yet to be cleared
        self._next_shard = 0
        self._turn = 0
        self._dropped: deque[deque[KVEvent]] = deque()  # events of removed engines: also freed slice by slice

    @property
    def num_keys(self) -> int:
        """Distinct keys of all engines, including those of removed ones until they are cleared."""
        return sum(map(len, self._shards))

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._behind or self._gone or self._dropped)

    def num_keys_of(self, engine: str) -> int:
        """Keys that the engine holds."""
        part = self._parts.get(engine)
        return 0 if part is None else part.num_keys

    def add_engine(self, engine: str, max_keys: int = sys.maxsize, *, num_needed: int = 0) -> None:
        """Start an empty part; the engine's first batch reports what it holds. Keys beyond `max_keys` are dropped.

        Args:
            num_needed: consecutive keys at the end of a prefix that make a hit (`keys_needed`); 0: all keys are needed.
        """
        self.remove_engine(engine)
        self._parts[engine] = _Part(engine, self._take_bit(engine, num_needed), max_keys, num_needed)

    def remove_engine(self, engine: str) -> None:
        """Remove the engine and its keys. Idempotent."""
        self.expected.remove_engine(engine)
        part = self._parts.pop(engine, None)
        if part is not None:
            self._drop_waiting(part)
            self._retire(part)
            self._notice()

    def apply(self, engine: str, events: KVEvents) -> bool:
        """Apply one batch of an engine, at once or gradually.

        Returns:
            False for a gap in the numbers, or for more than the engine's cache can hold while earlier batches still
            wait: the engine's part is empty now, and a Resync must be asked for (once: what comes before its answer is
            skipped).
        """
        part = self._parts.get(engine)
        if part is None:
            return True
        starts_over = bool(events.events) and isinstance(events.events[0], CacheCleared)
        if not starts_over and events.number != part.next_number:
            if part.asked:
                return True
            return self._start_over(part)
        part.asked = False
        part.next_number = events.number if events.more else events.number + 1
        if starts_over:
            self._drop_waiting(part)
        num_keys = sum(map(_num_keys, events.events))
        part.waiting.extend(events.events)
        part.num_waiting += num_keys
        if part.num_waiting == num_keys <= INLINE_KEYS and part not in self._behind:
            self._advance(part, INLINE_KEYS)
        elif part not in self._behind:
            self._behind.append(part)
        if part.num_waiting > _MAX_WAITING_KEYS + 2 * min(part.max_keys, sys.maxsize // 4):
            return self._start_over(part)
        self._notice()
        return True

    def work(self) -> bool:
        """Do a slice of the deferred work; returns whether more is left."""
        budget = SLICE_KEYS
        while budget > 0:
            if self._behind:
                part = self._behind[0]
                budget -= self._advance(part, budget) + 1
                if not part.waiting:
                    self._behind.popleft()
                else:
                    self._behind.rotate(-1)
            elif self._gone:
                budget -= self._clear_next_shard() + 1
            elif self._dropped:
                if self._dropped[0]:
                    budget -= _num_keys(self._dropped[0].popleft()) + 1
                else:
                    self._dropped.popleft()
            else:
                break
        self._is_due = self.has_work
        return self._is_due

    def _notice(self) -> None:
        """Have the work done that was deferred, unless that is on its way."""
        if not self._is_due and self.has_work:
            self._is_due = True
            if self._on_work is not None:
                self._on_work()

    def match(self, keys: Sequence[bytes]) -> "Match":
        """Tokens of the longest prefix of `keys` that each engine holds; engines without any are left out."""
        found = self._match_windows(keys)
        alive, shards = self._live & ~sum(self._windowed.values()), self._shards
        if not alive:
            return Match(self, found)
        for num_keys, key in enumerate(keys):
            mask = shards[hash(key) >> _SHARD_SHIFT & _SHARD_MASK].get(key, 0)
            ended = alive & ~mask
            if ended:
                if num_keys:
                    found.append((num_keys * self.hash_block_size, ended))
                alive &= mask
                if not alive:
                    return Match(self, found)
        if keys:
            found.append((len(keys) * self.hash_block_size, alive))
        return Match(self, found)

    def take_turn(self) -> int:
        """The number of a bit, of another engine each time."""
        self._turn = (self._turn + TURN_BITS) % max(self._live.bit_length(), 1)
        return self._turn

    def _match_windows(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """`match` for engines that need only a prefix's end."""
        found: list[tuple[int, int]] = []
        if not self._windowed:
            return found
        shards = self._shards
        masks = [shards[hash(key) >> _SHARD_SHIFT & _SHARD_MASK].get(key, 0) for key in keys]
        if not any(masks):
            return found
        for num_needed, missing in self._windowed.items():
            in_a_row = _masks_in_a_row(masks, num_needed)
            for num_keys in range(len(keys), 0, -1):
                if new := in_a_row[num_keys - 1] & missing:
                    found.append((num_keys * self.hash_block_size, new))
                    missing &= ~new
                    if not missing:
                        break
        return found

    # --- bits -----------------------------------------------------------------------------------------------------

    def _engines(self, mask: int) -> Iterator[str]:
        while mask:
            low = mask & -mask
            yield self._by_bit[low.bit_length() - 1]
            mask ^= low

    def _take_bit(self, engine: str, num_needed: int) -> int:
        bit = ~self._used & (self._used + 1)  # the lowest free bit
        self._used |= bit
        self._live |= bit
        if num_needed:
            self._windowed[num_needed] = self._windowed.get(num_needed, 0) | bit
        self._by_bit[bit.bit_length() - 1] = engine
        return bit

    def _retire(self, part: _Part) -> None:
        """Drop the contents of a part."""
        self._live &= ~part.bit
        if part.num_needed:
            self._windowed[part.num_needed] &= ~part.bit
        del self._by_bit[part.bit.bit_length() - 1]
        if part.num_keys:
            self._gone[part.bit] = _NUM_SHARDS
        else:
            self._used &= ~part.bit
        part.num_keys = 0

    def _clear_next_shard(self) -> int:
        """Clear the bits of removed parts from one shard; returns how many keys it has."""
        shard, gone = self._shards[self._next_shard], sum(self._gone)
        self._next_shard = (self._next_shard + 1) % _NUM_SHARDS
        num_keys = len(shard)
        for key, mask in [(key, mask) for key, mask in shard.items() if mask & gone]:
            if mask & ~gone:
                shard[key] = mask & ~gone
            else:
                del shard[key]
        for bit in list(self._gone):
            self._gone[bit] -= 1
            if not self._gone[bit]:
                del self._gone[bit]
                self._used &= ~bit
        return num_keys

    # --- events ---------------------------------------------------------------------------------------------------

    def _start_over(self, part: _Part) -> bool:
        """Empty the part until a Resync is answered; returns False, for `apply`."""
        self.num_gaps += 1
        part.next_number, part.asked = None, True
        self._drop_waiting(part)
        self._clear(part)
        self._notice()
        return False

    def _clear(self, part: _Part) -> None:
        if part.num_keys:
            self._retire(part)
            part.bit = self._take_bit(part.name, part.num_needed)

    def _drop_waiting(self, part: _Part) -> None:
        if part.waiting:
            self._dropped.append(part.waiting)
            part.waiting, part.done, part.num_waiting = deque(), 0, 0
        if part in self._behind:
            self._behind.remove(part)

    def _advance(self, part: _Part, budget: int) -> int:
        """Apply this many keys of the waiting events, and events without keys before them; returns how many."""
        done = 0
        while part.waiting and done < budget:
            event = part.waiting[0]
            keys: Sequence[bytes] = () if isinstance(event, CacheCleared) else event.keys
            if part.done or len(keys) > budget - done:
                keys = keys[part.done : part.done + budget - done]
            match event:
                case BlockStored():
                    self._store(part, keys)
                case BlockRemoved():
                    self._remove(part, keys)
                case CacheCleared():
                    self._clear(part)
                    self.expected.remove_engine(part.name)
            self.expected.forget(part.name, keys)
            done += len(keys)
            part.done += len(keys)
            part.num_waiting -= len(keys)
            if part.done >= _num_keys(event):
                part.waiting.popleft()
                part.done = 0
        return done

    def _store(self, part: _Part, keys: Sequence[bytes]) -> None:
        bit, shards, room = part.bit, self._shards, part.max_keys - part.num_keys
        num_new = num_excess = 0
        for key in keys:
            shard = shards[hash(key) >> _SHARD_SHIFT & _SHARD_MASK]
            mask = shard.get(key, 0)
            if mask & bit:
                continue
            if num_new == room:
                num_excess += 1
                continue
            shard[key] = mask | bit if mask else bit  # the one object of the engine's bit: most keys have one holder
            num_new += 1
        part.num_keys += num_new
        self.num_excess_keys += num_excess

    def _remove(self, part: _Part, keys: Sequence[bytes]) -> None:
        bit, shards = part.bit, self._shards
        for key in keys:
            shard = shards[hash(key) >> _SHARD_SHIFT & _SHARD_MASK]
            mask = shard.get(key, 0)
            if mask & bit:
                part.num_keys -= 1
                if mask == bit:
                    del shard[key]
                else:
                    shard[key] = mask & ~bit


class Match(Mapping[str, int]):
    """Tokens by engine, most first, as they are now: read out only for the engines that are asked about."""

    __slots__ = ("_index", "_levels")

    def __init__(self, index: PrefixIndex, levels: list[tuple[int, int]]) -> None:
        """`levels`: (tokens, bits of the engines that hold so many and no more)."""
        self._index = index
        self._levels = sorted(levels, reverse=True)

    def __getitem__(self, engine: str) -> int:
        if (num_tokens := self.get(engine, 0)) == 0:
            raise KeyError(engine)
        return num_tokens

    def get(self, engine: str, default: int = 0) -> int:  # type: ignore[override]
        """Tokens that the engine holds."""
        part = self._index._parts.get(engine)
        if part is not None:
            for num_tokens, mask in self._levels:
                if mask & part.bit:
                    return num_tokens
        return default

    def __iter__(self) -> Iterator[str]:
        return (engine for _, mask in self._levels for engine in self._index._engines(mask))

    def __len__(self) -> int:
        return sum(mask.bit_count() for _, mask in self._levels)

    @property
    def longest(self) -> int:
        """The most tokens that any engine holds."""
        return next((num_tokens for num_tokens, mask in self._levels if mask), 0)

    def most_first(self, *, in_turn: bool = False) -> Iterator[tuple[int, str]]:
        """(tokens, engine). `in_turn`: of many that hold as much, others come first each time."""
        first = self._index.take_turn() if in_turn else 0
        for num_tokens, mask in self._levels:
            behind = mask >> first << first
            for each in (behind, mask ^ behind):
                for engine in self._index._engines(each):
                    yield num_tokens, engine


def _masks_in_a_row(masks: Sequence[int], count: int) -> list[int]:
    """For each place, the bits common to it and the `count` - 1 places before it, or to all places before it.

    The number of steps does not depend on `count`: the places are cut into pieces of that size, and each place combines
    the end of one piece with the beginning of the next.
    """
    beginnings = list(masks)
    for i in range(1, len(masks)):
        if i % count:
            beginnings[i] &= beginnings[i - 1]
    ends = list(masks)
    for i in range(len(masks) - 2, -1, -1):
        if (i + 1) % count:
            ends[i] &= ends[i + 1]
    return [mask & ends[i - count + 1] if i >= count else mask for i, mask in enumerate(beginnings)]


def keys_needed(layout: KVLayout, hash_block_size: int) -> int:
    """The `num_needed` of an engine for `PrefixIndex.add_engine`: keys of the blocks that a token after a prefix
    attends to.

    The keys of an engine are those of its first KV group, which has a window only if all groups have one. The largest
    window counts.
    """
    if not all(layout.windows):
        return 0
    return max(-(-(max(layout.windows) - 1) // layout.block_size), 1) * layout.block_size // hash_block_size


def _num_keys(event: KVEvent) -> int:
    return 0 if isinstance(event, CacheCleared) else len(event.keys)
