"""The single writer of a segment: which values it holds, in which order they are evicted, and which pages are free."""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import inf
from typing import NamedTuple

import numpy as np

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import StoreFull
from pdkv.host.fence import fence
from pdkv.kv_store.base import Buffer, Held, Sized
from pdkv.kv_store.host_segment import LAST_END, PAGE_BYTES, Found, Key, Segment, check_of, num_pages_for
from pdkv.kv_store.terms import NO_TERMS, Ledger, Terms

MAX_PINNED_SHARE = 0.5
"""The share of a segment's pages that may be pinned: the others are for unpinned values."""

_MOST_AT_A_TIME = 64
"""Expired values that are dropped at a time: other lookups wait for no more than these."""


class _Held(NamedTuple):
    """A value of this segment."""

    entry: int
    pages: list[int]
    sized: Sized | None = None  # its key as its writer calls it, and its size; None: a predecessor wrote it
    terms: Terms = NO_TERMS


class SegmentWriter:
    """Threads may share it; no other process may write the segment."""

    def __init__(self, segment: Segment, clock: Clock = MONOTONIC) -> None:
        """Keep the values that are whole in the segment; the rest of it is free."""
        self.segment = segment
        self._clock = clock
        self.num_evicted = 0
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, _Held] = OrderedDict()  # least recently used first
        self._expected: dict[Key, None] = {}  # will be read soon, in this order; not all of them are here
        self._pins: dict[Key, float] = {}  # until when; they end with this process
        self._ledger: Ledger[Key] = Ledger()
        self._free_pages: list[int] = []
        self._free_entries: list[int] = []
        self._stamp = 0
        self._adopt()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def count(self) -> Held:
        """Counts of the segment's values and bytes."""
        num_bytes = (self.segment.num_pages - self.num_free_pages) * PAGE_BYTES
        return Held(len(self._held), num_bytes, self._num_bytes, self.num_evicted, self._ledger.count())

    @property
    def num_free_pages(self) -> int:
        """Pages that no value has."""
        return len(self._free_pages)

    def coldest(self, num_bytes: int) -> list[Sized]:
        """The values that would be evicted if this many more bytes were put, in that order, without those that a
        predecessor wrote; and for each owner, those that would be evicted if its values took the same share of its
        quota more.
        """
        with self._lock:
            others = (key for key in self._held if key not in self._expected)
            order = chain(others, filter(self._held.__contains__, reversed(self._expected)))
            found = self._first_to_go(order, num_pages_for(num_bytes) - len(self._free_pages))
            for owner, over in self._ledger.bytes_over(num_bytes / self._num_bytes).items():
                found |= self._first_to_go(self._ledger.owned(owner), num_pages_for(over))
        return list(found)

    def _first_to_go(self, order: Iterable[Key], num_pages: int) -> dict[Sized, None]:
        found: dict[Sized, None] = {}
        pinned_at, now = self._clock.now(), self.segment.unix_time()
        for key in order:
            if num_pages <= 0:
                break
            held = self._held[key]
            if self._pins.get(key, 0.0) > pinned_at or held.terms.are_over(now):
                continue
            num_pages -= len(held.pages)
            if held.sized is not None:
                found[held.sized] = None
        return found

    def terms_of(self, keys: Iterable[Key]) -> list[Terms]:
        """The terms of each value; empty if it has none or is not here."""
        with self._lock:
            return [self._ledger.terms_of(key) for key in keys]

    def find(self, key: Key, *, is_use: bool = True) -> Found | None:
        """The place of a value, which becomes the most recently used one if this counts as a use."""
        with self._lock:
            held = self._held.get(key)
            if held is None:
                return None
            if held.terms.expires_at and held.terms.are_over(self.segment.unix_time()):
                self._remove(key)
                return None
            if is_use:
                self._use(key, held)
            fields = self.segment.entries[held.entry]
            return Found(held.entry, int(fields["version"]), int(fields["size"]), held.pages[0])

    def put(self, key: Key, value: Buffer, name: bytes = b"", terms: Terms = NO_TERMS) -> None:
        """Add a value, evicting the least recently used ones; a value that exists is left as it is.

        Args:
            name: the key from which `key` was made, for the result of `coldest`.
            terms: with a quota, only the owner's values are evicted; an expired value is not added.

        Raises:
            StoreFull: it is larger than the segment or its owner's quota, or there is no memory.
        """
        if terms.expires_at > LAST_END:
            terms = terms._replace(expires_at=LAST_END)
        if terms.are_over(self.segment.unix_time()):
            return
        self._drop_what_is_over()
        with self._lock:
            if (held := self._held.get(key)) is not None:
                self._use(key, held)
                return
            held = self._take_room(value.nbytes, terms)._replace(sized=(name, value.nbytes) if name else None)
        try:
            self.segment.write(held.pages, value)
        except OSError as error:
            self._give_back(held)
            raise StoreFull(f"host memory: {error.strerror}") from None
        with self._lock:
            if key in self._held:  # another thread was faster
                self._free(held)
            else:
                self._publish(key, held, value.nbytes)

    def _drop_what_is_over(self) -> None:
        """Values whose time is over go before any other one has to."""
        now, num_dropped = self.segment.unix_time(), _MOST_AT_A_TIME
        while num_dropped == _MOST_AT_A_TIME:
            num_dropped = 0
            with self._lock:
                while num_dropped < _MOST_AT_A_TIME and (key := self._ledger.first_over(now)) is not None:
                    self._remove(key)
                    num_dropped += 1

    def remove(self, key: Key) -> None:
        """Drop a value, if it is there."""
        with self._lock:
            if key in self._held:
                self._remove(key)

    def discard(self, keys: Sequence[Key] | None) -> int:
        """Drop these values, or all, pinned ones too; returns how many there were."""
        with self._lock:
            found = list(self._held) if keys is None else [key for key in dict.fromkeys(keys) if key in self._held]
            for key in found:
                self._remove(key)
            return len(found)

    def pin(self, keys: Sequence[Key], ttl_s: float | None) -> list[bool]:
        """Protect those of these values that are here from eviction, for `ttl_s` from now; None: until `unpin`.

        Raises:
            StoreFull: all pinned values together would take more than a bounded share; then none of these is pinned.
        """
        self._drop_what_is_over()
        with self._lock:
            self._end_pins()
            found = [key for key in keys if key in self._held]
            num_pages = sum(len(self._held[key].pages) for key in {*self._pins, *found})
            most = int(self.segment.num_pages * MAX_PINNED_SHARE)
            if num_pages > most:
                raise StoreFull(
                    f"host memory: {num_pages * PAGE_BYTES} bytes would be pinned, {len(self._pins)} values of them "
                    f"before; at most {most * PAGE_BYTES} of {self._num_bytes} may be"
                )
            until = inf if ttl_s is None else self._clock.now() + ttl_s
            self._pins.update(dict.fromkeys(found, until))
            return [key in self._held for key in keys]

    def unpin(self, keys: Sequence[Key] | None) -> int:
        """Remove the pins of these keys, or all; returns how many there were."""
        with self._lock:
            self._end_pins()
            found = list(self._pins) if keys is None else [key for key in dict.fromkeys(keys) if key in self._pins]
            for key in found:
                del self._pins[key]
            return len(found)

    def expect(self, keys: Iterable[Key]) -> None:
        """Note that these values will be read soon, in this order: they are evicted only when nothing else is left, the
        last ones first.
        """
        with self._lock:
            self._expected.update(dict.fromkeys(keys))

    def unexpect(self, keys: Sequence[Key]) -> None:
        """Note that these values were read, or will not be; those that are here count as just used, the first last."""
        with self._lock:
            for key in reversed(keys):
                self._expected.pop(key, None)
                if (held := self._held.get(key)) is not None:
                    self._use(key, held)

    @property
    def _num_bytes(self) -> int:
        return self.segment.num_pages * PAGE_BYTES

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _take_room(self, num_bytes: int, terms: Terms) -> _Held:
        """Pages and an entry for a value that will be published, or freed."""
        num_pages = num_pages_for(num_bytes)
        if num_pages > self.segment.num_pages:
            raise StoreFull(f"host memory: {num_bytes} bytes do not fit into {self._num_bytes}")
        if terms.quota is not None and num_pages * PAGE_BYTES > terms.quota:
            raise StoreFull(
                f"host memory: {num_bytes} bytes, in pages, do not fit into their owner's quota of {terms.quota}"
            )
        while not self._ledger.fits(terms, num_pages * PAGE_BYTES):
            self._evict(self._ledger.owned(terms.owner))
        while len(self._free_pages) < num_pages or not self._free_entries:
            self._evict(self._held)
        self._ledger.take(terms, num_pages * PAGE_BYTES)
        return _Held(self._free_entries.pop(), [self._free_pages.pop() for _ in range(num_pages)], terms=terms)

    def _evict(self, among: Mapping[Key, object]) -> None:
        """Drop the least recently used value of these, the first one, that is neither pinned nor expected; those pass
        for used, so that each is met once. Where there is none, that which is needed last.

        Raises:
            StoreFull: there is none that is not pinned.
        """
        now = self._clock.now()
        for _ in range(len(among)):
            key = next(iter(among))
            if self._pins.get(key, 0.0) <= now and key not in self._expected:
                break
            self._use(key, self._held[key])
        else:
            free = (k for k in reversed(self._expected) if k in among and self._pins.get(k, 0.0) <= now)
            found = next(free, None)
            if found is None:
                whose = "all of it" if among is self._held else "all of what its owner may have"
                raise StoreFull(f"host memory: {whose} is being written, or pinned")
            key = found
        self._remove(key)
        self.num_evicted += 1

    def _end_pins(self) -> None:
        """Forget those whose time is over."""
        now = self._clock.now()
        self._pins = {key: until for key, until in self._pins.items() if until > now}

    def _use(self, key: Key, held: _Held) -> None:
        self._held.move_to_end(key)
        self._ledger.use(key)
        self._stamp += 1
        self.segment.entries["stamp"][held.entry] = self._stamp

    def _publish(self, key: Key, held: _Held, size: int) -> None:
        segment, entry, pages = self.segment, held.entry, held.pages
        segment.next_page[pages[:-1]] = pages[1:]
        fields = segment.entries[entry]
        fields["key"] = key
        fields["size"], fields["first_page"], fields["check"] = size, pages[0], check_of(key, size, pages, held.terms)
        fields["expires_at"], fields["owner"] = held.terms.expires_at, held.terms.owner
        fence()
        segment.versions[entry] = (int(segment.versions[entry]) | 1) + 1
        self._link(key, entry)
        self._held[key] = held
        self._ledger.enter(key, held.terms)
        self._use(key, held)

    def _link(self, key: Key, entry: int) -> None:
        bucket = self.segment.bucket_of(key)
        self.segment.next_entry[entry] = self.segment.buckets[bucket]
        fence()
        self.segment.buckets[bucket] = entry + 1

    def _remove(self, key: Key) -> None:
        """Remove a value so that it is no longer found and its readers notice; then its pages are free."""
        segment, held = self.segment, self._held.pop(key)
        self._pins.pop(key, None)
        segment.versions[held.entry] += np.uint64(1)
        fence()
        self._unlink(key, held.entry)
        self._ledger.leave(key)
        self._free(held)

    def _unlink(self, key: Key, entry: int) -> None:
        links, place = self.segment.buckets, self.segment.bucket_of(key)
        for _ in range(self.segment.num_pages):
            if links[place] == entry + 1:
                links[place] = self.segment.next_entry[entry]
                return
            links, place = self.segment.next_entry, int(links[place]) - 1

    def _free(self, held: _Held) -> None:
        """Free a value's room. It is no longer found, and the ledger no longer has it."""
        self._free_entries.append(held.entry)
        self._free_pages += reversed(held.pages)
        self._ledger.give_back(held.terms, len(held.pages) * PAGE_BYTES)

    def _give_back(self, held: _Held) -> None:
        with self._lock:
            self._free(held)

    # --- at the start -----------------------------------------------------------------------------------------------

    def _adopt(self) -> None:
        segment = self.segment
        versions = segment.versions
        candidates = np.flatnonzero((versions > 0) & (versions % 2 == 0))
        newest_first = candidates[np.argsort(segment.entries["stamp"][candidates])[::-1]]
        segment.buckets[:] = 0
        is_free = np.ones(segment.num_pages, np.bool_)
        kept: dict[Key, _Held] = {}
        for entry in newest_first.tolist():
            fields = segment.entries[entry]
            key, size = (int(fields["key"][0]), int(fields["key"][1])), int(fields["size"])
            pages = segment.pages_of(Found(entry, 0, size, int(fields["first_page"])))
            if pages is None or key in kept or not is_free[pages].all() or len(set(pages)) < len(pages):
                pages = None
            terms = Terms(int(fields["expires_at"]), int(fields["owner"]))
            if pages is None or check_of(key, size, pages, terms) != int(fields["check"]):
                versions[entry] |= np.uint64(1)
                continue
            is_free[pages] = False
            kept[key] = _Held(entry, pages, terms=terms)
        used = {held.entry for held in kept.values()}
        self._free_entries = [entry for entry in range(segment.num_pages) if entry not in used]
        self._free_pages = np.flatnonzero(is_free)[::-1].tolist()
        for key, held in reversed(kept.items()):
            self._link(key, held.entry)
            self._held[key] = held
            self._ledger.take(held.terms, len(held.pages) * PAGE_BYTES)
            self._ledger.enter(key, held.terms)
            self._use(key, held)
