"""One of several stores combined into one: what it accepts, its history, and when it is left alone."""

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Literal

from pdkv.base.clock import Clock
from pdkv.errors import StoreError, StoreFull, StoreReadOnly, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Item, KVStore
from pdkv.kv_store.read_meter import ReadMeter
from pdkv.kv_store.recent_keys import RecentKeys

WritePolicy = Literal["all", "second-use", "evicted"]
"""What a tier stores: everything written; what is used again; what is about to be evicted from host memory."""

CallKind = Literal["read", "write"]

MAX_REST_S = 60.0


class Rest:
    """How long calls are skipped after a failure: twice as long each time, until one succeeds."""

    def __init__(self, first_s: float) -> None:
        self.until = 0.0
        self._first_s = self._next_s = first_s

    def begin(self, now: float) -> None:
        """Note a failed call. Concurrent failures count as one."""
        if self.until <= now:
            self.until = now + self._next_s
            self._next_s = min(2 * self._next_s, max(MAX_REST_S, self._first_s))

    def succeeded(self) -> None:
        """Note a successful call."""
        self._next_s = self._first_s


class Tier:
    """One of several stores, with its history. The lock of the combined store guards its state."""

    def __init__(
        self, name: str, store: KVStore, write: WritePolicy, first_rest_s: float, *, watches: bool, clock: Clock
    ) -> None:
        self.name = name
        self._now = clock.now
        self.store = store
        self.write = write
        self.put_once = RecentKeys() if write == "second-use" else None  # keys that it was not given yet
        self.num_hits = 0
        self.meter = ReadMeter(clock.now)
        self.failures: Counter[str] = Counter()  # by error code; "skipped": calls while it was left alone
        self.is_near = store.medium != "store"  # no server that could hang or be full for all
        self.is_watched = watches and not self.is_near
        self.away: StoreError | None = None  # why it does not answer: not even reads are tried before a probe succeeds
        self.calls: dict[int, float] = {}  # under way: when each began, the oldest first
        self.vouched_at = 0.0  # it was there
        self.reads, self.writes = Rest(first_rest_s), Rest(first_rest_s)

    def rests(self, kind: CallKind, now: float | None = None) -> bool:
        """Whether such calls are currently skipped."""
        now = self._now() if now is None else now
        return self.away is not None or self.reads.until > now or (kind == "write" and self.writes.until > now)

    def failed(self, kind: CallKind, error: StoreError, now: float) -> None:
        """Note a failed call. Reads are only skipped after a failed write if the tier cannot be reached; a tier that is
        full, or slow to write, is still read.

        In a store with a quota for each owner, StoreFull says nothing about others' values.
        """
        if isinstance(error, StoreUnavailable) or (kind == "read" and isinstance(error, (StoreTimeout, StoreReadOnly))):
            self.reads.begin(now)
            if self.is_watched:
                self.away = error
        elif isinstance(error, (StoreTimeout, StoreReadOnly)) or (isinstance(error, StoreFull) and not self.is_near):
            self.writes.begin(now)

    def probe_at(self, late_s: float) -> float:
        """When to probe the tier: after a rest, or when a call takes long."""
        if self.away is not None:
            return self.reads.until
        return max(next(iter(self.calls.values())), self.vouched_at) + late_s if self.calls else inf

    def taken(self, items: Sequence[Item]) -> Sequence[Item]:
        """The values, of those being put, that the tier stores. With second-use, these are values that it was offered
        before.
        """
        if self.put_once is None:
            return items if self.write == "all" else ()
        again = [item for item in items if item[0] in self.put_once]
        for key, _ in items:
            self.put_once.add(key)
        return again
