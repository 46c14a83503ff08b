"""Copies values from the fastest tier into slower ones."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.log_limit import LogLimit
from pdkv.base.service_thread import ServiceThread
from pdkv.errors import StoreError, StoreTimeout
from pdkv.kv_store.base import Item, KVStore, Sized
from pdkv.kv_store.recent_keys import RecentKeys
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.kv_store.tier import Tier, WritePolicy

logger = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
"""Bytes copied at a time, at least one value: everything in flight."""

MAX_QUEUED = 4096
"""The most values that wait to be copied; beyond it, a value is left for its next use."""

_Queue = OrderedDict[bytes, tuple[int, Terms]]
"""Sizes and terms of waiting values."""

_POLICIES: Sequence[WritePolicy] = ("all", "second-use", "evicted")

COLD_SHARE = 8
"""The share of host memory, as a divisor, that is about to be evicted and is copied before."""

WRITTEN_FOR_S = 60.0
"""Seconds for which a value is believed to be where it was written; then the tier is asked."""


class Backfill:
    """Copies in the background, on one thread that starts with the first copy. No call waits for it.

    A value that leaves the source before its turn is not copied, which costs a miss later.
    """

    def __init__(
        self,
        source: KVStore,
        tiers: Sequence[Tier],
        put: Callable[[Tier, Sequence[Item], Mapping[bytes, Terms]], bool],
        delete: Callable[[Tier, Sequence[bytes]], object],
        clock: Clock = MONOTONIC,
    ) -> None:
        """`put` writes what a tier lacks, and returns whether the tier now has everything. Neither it nor `delete`
        raises StoreError.
        """
        self._source = source
        self._put = put
        self._delete = delete
        self._clock = clock
        self._tiers = {policy: [t for t in tiers if t.write == policy] for policy in _POLICIES}
        self._log_limit = LogLimit(60.0)
        self._changed = threading.Condition()  # its lock guards what follows
        self._offered = {policy: _Queue() for policy in _POLICIES}  # values written, or used again
        self._written = {policy: RecentKeys(WRITTEN_FOR_S, now=clock.now) for policy in _POLICIES}
        self._looks = False  # the source has less room than before
        self._is_busy = False
        self._is_held = False  # no copy is to begin
        self._deleted: set[bytes] | None = set()  # while the thread was busy; None: all
        self._thread = ServiceThread(self._serve, self._wake, "pdkv-backfill")

    def used(self, items: Iterable[Sized], terms: Mapping[bytes, Terms] = MappingProxyType({})) -> None:
        """Note that the source has these values and that they were read. `terms`: the terms of those that have any."""
        if self._tiers["second-use"]:
            self.offer((item for item in items if item[0] not in self._written["second-use"]), terms, "second-use")

    def offer(self, items: Iterable[Sized], terms: Mapping[bytes, Terms], policy: WritePolicy) -> None:
        """Offer values of the source to the tiers of the policy. Those beyond the limit are not copied."""
        new, queue = list(items), self._offered[policy]
        with self._changed:
            num_taken = max(MAX_QUEUED - len(queue), 0)
            for key, size in new[:num_taken]:
                queue[key] = size, terms.get(key, NO_TERMS)
            if queue:
                self._begin()
        for tier in self._tiers[policy] if len(new) > num_taken else ():
            tier.failures["skipped"] += len(new) - num_taken

    def room_taken(self) -> None:
        """Note that something was put into the source."""
        if self._tiers["evicted"]:
            with self._changed:
                self._looks = True
                self._begin()

    def forget(self, keys: Sequence[bytes] | None) -> None:
        """Forget these values, or all, which are deleted: a running copy must not bring them back. Called before the
        deletion.
        """
        with self._changed:
            for policy in _POLICIES:
                queue, written = self._offered[policy], self._written[policy]
                if keys is None:
                    queue.clear()
                    written.clear()
                for key in keys or ():
                    queue.pop(key, None)
                    written.discard(key)
            if keys is None:
                self._deleted = None
            elif self._is_busy and self._deleted is not None:
                self._deleted.update(keys)

    @contextmanager
    def still(self, timeout_s: float) -> Iterator[None]:
        """A context in which nothing is copied; a running copy ends before it, taking its values back if necessary.

        Raises:
            StoreTimeout: the copy does not end within `timeout_s`.
        """
        deadline = self._clock.now() + timeout_s
        with self._changed:
            self._wait_until(lambda: not self._is_held, deadline)
            self._is_held = True  # the copy that is next waits, too
        try:
            with self._changed:
                self._wait_until(lambda: not self._is_busy, deadline)
            yield
        finally:
            with self._changed:
                self._is_held = False
                self._changed.notify_all()

    def close(self) -> None:
        """End the thread, with the current call of a tier. Idempotent."""
        self._thread.stop()

    def _wait_until(self, condition: Callable[[], bool], deadline: float) -> None:
        if not self._clock.wait_for(self._changed, condition, deadline):
            raise StoreTimeout("a copy between tiers has not ended in time")

    def _begin(self) -> None:
        self._thread.start()
        self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _serve(self, stopping: threading.Event) -> None:
        while True:
            with self._changed:
                while not stopping.is_set() and (self._is_held or not (any(self._offered.values()) or self._looks)):
                    self._changed.wait()
                if stopping.is_set():
                    return
                self._is_busy, self._deleted = True, set()
                policy: WritePolicy = "all" if self._offered["all"] else "second-use"
                batch, terms = _take_batch(self._offered[policy])
                looks, self._looks = self._looks, False
            try:
                if batch:
                    self._copy(batch, policy, terms)
                if looks:
                    self._copy_coldest()
            except Exception:  # the thread goes on with what comes next
                logger.exception("KV store: values were not copied into a slower tier")
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _copy_coldest(self) -> None:
        """Copy values that are next to be evicted and not in the slower tiers yet, while there are some."""
        window = self._source.coldest(self._source.count_held().capacity // COLD_SHARE)
        cold = _Queue((key, (size, NO_TERMS)) for key, size in window if key not in self._written["evicted"])
        batch, _ = _take_batch(cold)
        copied = self._copy(batch, "evicted", self._source.terms_of([key for key, _ in batch]))
        with self._changed:
            self._looks |= bool(cold) and len(copied) == len(batch)

    def _copy(self, batch: Sequence[Sized], policy: WritePolicy, terms: Mapping[bytes, Terms]) -> list[bytes]:
        """Copy values; returns those that all tiers of the policy have now, and remembers them for a while."""
        items = self._read(batch)
        are_put = [self._put(tier, items, terms) for tier in self._tiers[policy]] if items else [False]
        keys = [key for key, _ in items]
        with self._changed:
            deleted = {key for key in keys if self._deleted is None or key in self._deleted}
            copied = [key for key in keys if key not in deleted] if all(are_put) else []
            for key in copied:
                self._written[policy].add(key)
        for tier in self._tiers[policy] if deleted else ():
            self._delete(tier, sorted(deleted))
        return copied

    def _read(self, batch: Sequence[Sized]) -> list[Item]:
        memory = memoryview(bytearray(sum(size for _, size in batch)))
        buffers, end = [], 0
        for _, size in batch:
            buffers.append(memory[end : end + size])
            end += size
        keys = [key for key, _ in batch]
        try:
            found = self._source.peek(keys, buffers)
        except StoreError as error:
            if self._log_limit.passes():
                logger.warning("KV store: values to be copied into a slower tier cannot be read: %s", error)
            return []
        return [item for item, is_found in zip(zip(keys, buffers, strict=True), found, strict=True) if is_found]


def _take_batch(queue: _Queue) -> tuple[list[Sized], dict[bytes, Terms]]:
    """Take the first BATCH_BYTES of values off the queue, and the terms of those that have some."""
    batch: list[Sized] = []
    terms: dict[bytes, Terms] = {}
    num_bytes = 0
    while queue:
        key, (size, own) = next(iter(queue.items()))
        if batch and num_bytes + size > BATCH_BYTES:
            break
        del queue[key]
        batch.append((key, size))
        num_bytes += size
        if own != NO_TERMS:
            terms[key] = own
    return batch, terms
