"""The known content of a store: answers from memory, lookups on a thread, a deadline for each.

A chain of keys is looked up from its first unknown key; the answer is the number of consecutive keys that are stored.
For other keys the answer is which of them are stored.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import compress, product
from math import inf

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.service_thread import ServiceThread
from pdkv.errors import TransferError
from pdkv.kv_store.base import PROBE_KEY, KVStore
from pdkv.wire.reports import ConnectorStats

logger = logging.getLogger(__name__)

MAX_KNOWN_KEYS = 1 << 16
MAX_LOOKUPS = 1024
"""The most queued lookups; beyond them the answer is a miss."""

MAX_BARRED_KEYS = 1 << 12
BARRED_S = 30.0
"""Seconds for which a damaged value is not requested again, unless it is saved again here."""

MISS_VALID_S = 1.0
"""Seconds for which a miss is believed without asking again; the answer to a lookup is given once, however late."""


@dataclass(eq=False, slots=True)
class _Lookup:
    """Unknown keys or, of a chain, those from its first unknown key on."""

    keys: list[bytes]
    is_chain: bool
    deadline: float
    wanted: bool  # a request waits for it
    answered: bool = False


@dataclass(slots=True)
class _Miss:
    """A key that the store did not have at `time`."""

    time: float
    told: bool = False


class KeyLookups:
    """Which values a store has. The step thread asks and never waits; `close` ends the threads.

    Args:
        suffixes: every value consists of one part for each; one that lacks a part is a miss.
        notify: wakes the engine when an answer is there.
        timeout_s: deadline of a lookup; after it, the answer is that of the store's first part if that is not a server,
            else a miss.
        known_for_s: seconds for which an answer is trusted, since the store may evict.
        probe_interval_s: how often a store that does not answer is probed although nothing waits, and once at the
            start; infinity: never.
    """

    def __init__(
        self,
        store: KVStore,
        suffixes: Sequence[bytes],
        notify: Callable[[], None],
        *,
        timeout_s: float,
        known_for_s: float = 30.0,
        probe_interval_s: float = inf,
        clock: Clock = MONOTONIC,
    ) -> None:
        self.num_failed = 0  # the store said so
        self.num_timeouts = 0
        self.num_refused = 0  # too many at once, or the store is known not to answer: counted as misses
        self._store = store
        parts = list(store.parts().values())
        self._near = parts[0] if len(parts) > 1 and parts[0].medium != "store" else None
        self._suffixes = list(suffixes)
        self._notify = notify
        self._timeout_s = timeout_s
        self._clock = clock
        self._known_for_s = known_for_s
        self._known: OrderedDict[bytes, float] = OrderedDict()  # since when; step thread and lookups, under the lock
        self._ends: OrderedDict[bytes, int] = OrderedDict()  # unix times, for values that are known to expire
        self._barred: OrderedDict[bytes, float] = OrderedDict()  # until when
        self._misses: OrderedDict[bytes, _Miss] = OrderedDict()
        self._pending: OrderedDict[bytes, _Lookup] = OrderedDict()  # by first key, in order of their deadlines
        self._queue: list[_Lookup] = []
        self._problem = ""  # why the last lookup failed: until one succeeds, they run one at a time
        self._probe_interval_s = probe_interval_s
        self._next_probe = inf if probe_interval_s == inf else 0.0  # when the store is probed although nothing waits
        self._changed = threading.Condition()  # its lock guards all of this
        self._threads = [
            ServiceThread(self._serve, self._wake, "pdkv-lookup"),
            ServiceThread(self._watch, self._wake, "pdkv-lookup-deadline"),
        ]
        for thread in self._threads:
            thread.start_or(self.close)
        store.on_problem(notify)

    @property
    def stats(self) -> ConnectorStats:
        """Counts of failures."""
        with self._changed:
            num_late, num_failed = self.num_timeouts, self.num_failed
        return ConnectorStats(failed_lookups=num_failed + num_late, timeouts=num_late)

    @property
    def problem(self) -> str:
        """Why the store, or a part of it, does not answer; empty: it answered the last request."""
        return self._problem or self._store.problem

    # --- the step thread ------------------------------------------------------------------------------------------

    def num_found(self, keys: Sequence[bytes], *, wanted: bool = True) -> int | None:
        """Number of the first keys that are stored; None: they are being looked up, and `notify` announces the answer.

        Args:
            wanted: False: only start the lookup, the answer is asked for later.
        """
        now = self._clock.now()
        with self._changed:
            first = next((i for i, key in enumerate(keys) if not self._believes(key, now)), len(keys))
            if first == len(keys) or self._misses_now(keys[first], now, wanted=wanted):
                return first
            return None if self._begin(keys[first:], now, wanted=wanted, is_chain=True) else first

    def look_up(self, keys: Sequence[bytes], *, wanted: bool = True) -> list[bool] | None:
        """Which of the keys are stored; None: they are being looked up, and `notify` announces the answer. `wanted`: as
        above.
        """
        now = self._clock.now()
        with self._changed:
            answers = [self._believes(key, now) for key in keys]
            unknown = [
                key
                for key, is_there in zip(keys, answers, strict=True)
                if not (is_there or self._misses_now(key, now, wanted=wanted))
            ]
            return None if unknown and self._begin(unknown, now, wanted=wanted, is_chain=False) else answers

    def _misses_now(self, key: bytes, now: float, *, wanted: bool) -> bool:
        """Whether a key is known to be useless."""
        if key in self._barred:
            return True
        miss = self._misses.get(key)
        if miss is None or (miss.told and now - miss.time >= MISS_VALID_S):
            return False
        miss.told = miss.told or wanted
        return True

    def _begin(self, keys: Sequence[bytes], now: float, *, wanted: bool, is_chain: bool) -> bool:
        """Look up keys, of which the first is unknown; False: there are too many lookups."""
        lookup = self._pending.get(keys[0])
        if lookup is not None:
            lookup.wanted = lookup.wanted or wanted
            return True
        if len(self._pending) >= (1 if self._problem else MAX_LOOKUPS):
            self.num_refused += wanted
            return False
        lookup = self._pending[keys[0]] = _Lookup(list(keys), is_chain, now + self._timeout_s, wanted)
        self._queue.append(lookup)
        self._changed.notify_all()
        return True

    def are_known(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of the values are known to be stored."""
        now = self._clock.now()
        with self._changed:
            if self._barred:
                return [self._believes(key, now) for key in keys]
            known, oldest = self._known, now - self._known_for_s
            return [known.get(key, oldest) > oldest for key in keys]

    def was_known(self, key: bytes) -> bool:
        """Whether the value was stored at the last lookup, however long ago."""
        return key in self._known

    def add(self, keys: Sequence[bytes], ends_at: int = 0) -> None:
        """Note that these values are stored now, and intact: they were saved or loaded. `ends_at`: unix time; 0: no
        expiry.
        """
        with self._changed:
            if self._barred:
                for key in keys:
                    self._barred.pop(key, None)
            self._add(keys)
            if ends_at:
                self._ends.update(dict.fromkeys(keys, ends_at))
                while len(self._ends) > MAX_KNOWN_KEYS:
                    self._ends.popitem(last=False)

    def ended(self, keys: Sequence[bytes], by: float) -> list[bytes]:
        """Values known to have expired at a unix time: a store without expiry may still have them."""
        with self._changed:
            return [key for key in keys if self._ends.get(key, inf) <= by] if self._ends else []

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget values that may or may not be stored, after a load did not find them, or a failed save. They are
        looked up on demand.
        """
        with self._changed:
            for key in keys:
                self._known.pop(key, None)
                self._misses.pop(key, None)

    def forget_all(self) -> None:
        """Forget everything: stored values may be gone."""
        with self._changed:
            self._known.clear()

    def barred(self, keys: Sequence[bytes]) -> list[bytes]:
        """Values that were recently found damaged, or that followed a damaged one."""
        now = self._clock.now()
        with self._changed:
            return [key for key in keys if now < self._barred.get(key, 0.0)] if self._barred else []

    def bar(self, keys: Sequence[bytes]) -> None:
        """Note values that are damaged, or may be: they are misses for BARRED_S, whatever the store says."""
        until = self._clock.now() + BARRED_S
        with self._changed:
            for key in keys:
                self._known.pop(key, None)
                self._barred.pop(key, None)
                self._barred[key] = until
            while len(self._barred) > MAX_BARRED_KEYS:
                self._barred.popitem(last=False)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._store.hang_up(for_good=True)
        for thread in self._threads:
            thread.stop()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- under the lock -------------------------------------------------------------------------------------------

    def _believes(self, key: bytes, now: float) -> bool:
        if self._barred:
            until = self._barred.get(key)
            if until is not None:
                if now < until:
                    return False
                del self._barred[key]
        since = self._known.get(key)
        return since is not None and now - since < self._known_for_s

    def _add(self, keys: Sequence[bytes]) -> None:
        known, now = self._known, self._clock.now()
        for key in keys:  # `update` of an ordered dictionary takes twice as long
            known[key] = now
            known.move_to_end(key)
        for key in self._misses.keys() & keys:
            del self._misses[key]
        while len(self._known) > MAX_KNOWN_KEYS:
            self._known.popitem(last=False)

    def _missed(self, key: bytes) -> None:
        self._misses[key] = _Miss(self._clock.now())
        self._misses.move_to_end(key)
        while len(self._misses) > MAX_KNOWN_KEYS:
            self._misses.popitem(last=False)

    def _answer(self, lookup: _Lookup, stored: Container[bytes]) -> None:
        """Note that these keys are stored: of a chain, those before the first missing one. A late answer corrects the
        miss.
        """
        keys = lookup.keys
        if lookup.is_chain:
            num_found = next((i for i, key in enumerate(keys) if key not in stored), len(keys))
            found, missing = keys[:num_found], keys[num_found : num_found + 1]
        else:
            found, missing = [k for k in keys if k in stored], [k for k in keys if k not in stored]
        self._add(found)
        if found or not lookup.answered:
            for key in missing:
                self._missed(key)
        if not lookup.answered:
            lookup.answered = True
            del self._pending[keys[0]]

    def _failed(self, what: str) -> None:
        if not self._problem:
            logger.warning("KV store: %s; prompts are computed instead (not reported again until it answers)", what)
        self._problem = what
        self._next_probe = self._clock.now() + self._probe_interval_s

    # --- threads --------------------------------------------------------------------------------------------------

    def _serve(self, stopping: threading.Event) -> None:
        while True:
            with self._changed:
                while not (self._queue or stopping.is_set() or self._next_probe <= self._clock.now()):
                    self._clock.wait(self._changed, self._next_probe if self._next_probe < inf else None)
                if stopping.is_set():
                    return
            self._answer_all()

    def _answer_all(self) -> None:
        """Answer what is queued."""
        with self._changed:
            lookups, self._queue = self._queue, []
        error = ""
        stored: set[bytes] = set()
        try:
            stored = self._look_all_up(lookups)
        except TransferError as failure:
            error = f"a lookup failed ({failure.code}: {failure})"
        except Exception as failure:  # the thread goes on, and the caller gets a miss
            if not self._problem:
                logger.exception("KV store: a lookup raised an error other than StoreError")
            error = f"a lookup failed ({failure!r})"
        with self._changed:
            before = self._problem
            for lookup in lookups:
                self._answer(lookup, stored)
            if error:
                self.num_failed += len(lookups)
                self._failed(error)
            else:
                if self._problem:
                    logger.info("KV store: it answers again")
                self._problem, self._next_probe = "", inf
            wanted = any(lookup.wanted for lookup in lookups)
            has_changed = before != self._problem
        if wanted or has_changed:
            self._notify()

    def _look_all_up(self, lookups: Sequence[_Lookup]) -> set[bytes]:
        """Which values are stored, for these lookups; with no lookups, whether the store answers."""
        chains, keys = list[list[bytes]](), dict[bytes, None]()
        for lookup in lookups:
            if lookup.is_chain and self._store.asks_key_by_key:
                chains.append(lookup.keys)
            else:
                keys.update(dict.fromkeys(lookup.keys))
        stored = self._look_up_chains(chains) if chains else set[bytes]()
        return stored if chains and not keys else stored | self._look_up(list(keys) or [PROBE_KEY], self._store)

    def _look_up_chains(self, chains: Sequence[list[bytes]]) -> set[bytes]:
        """The first keys of each chain that are stored: one part of some of them, then the other parts of the
        last one.
        """
        first, *others = self._suffixes
        counts = self._store.count_prefixes([[key + first for key in chain] for chain in chains])
        found = [chain[:count] for chain, count in zip(chains, counts, strict=True) if count]
        there = self._store.contains([chain[-1] + suffix for chain in found for suffix in others]) if others else []
        size = len(others)
        stored, in_doubt = set[bytes](), set[bytes]()
        for i, chain in enumerate(found):
            (stored if all(there[i * size : (i + 1) * size]) else in_doubt).update(chain)
        return stored | self._look_up(list(in_doubt), self._store) if in_doubt else stored

    def _look_up(self, keys: list[bytes], store: KVStore) -> set[bytes]:
        """Which values are stored with all their parts: first one part of each, then the others of those found."""
        first, *others = self._suffixes
        found = list(compress(keys, store.contains([key + first for key in keys])))
        if not others or not found:
            return set(found)
        there = store.contains([key + suffix for key, suffix in product(found, others)])
        size = len(others)
        return {key for i, key in enumerate(found) if all(there[i * size : (i + 1) * size])}

    def _watch(self, stopping: threading.Event) -> None:
        """Answer overdue lookups with the content of the first tier."""
        while True:
            with self._changed:
                now = self._clock.now()
                late = [lookup for lookup in self._pending.values() if lookup.deadline <= now]
            near = self._look_near(late)
            with self._changed:
                for lookup in late:
                    if lookup.answered:
                        continue
                    self._answer(lookup, near)
                    self.num_timeouts += 1
                    if self._near is None:
                        self._failed(f"no answer to a lookup within {self._timeout_s:g} s")
                if not late:
                    if stopping.is_set():
                        return
                    first = next(iter(self._pending.values()), None)
                    self._clock.wait(self._changed, None if first is None else first.deadline)
                    continue
            self._notify()

    def _look_near(self, lookups: Sequence[_Lookup]) -> set[bytes]:
        """The lookups' keys that the first part has."""
        if self._near is None or not lookups:
            return set()
        try:
            return self._look_up(list(dict.fromkeys(key for lookup in lookups for key in lookup.keys)), self._near)
        except Exception as error:  # as in `_answer_all`
            logger.debug("the first part of the store cannot be asked: %s", error)
            return set()
