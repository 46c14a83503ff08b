"""Values on their way from the fastest tier into slower ones that do not take all that is written."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from pdkv.kv_store.base import Item, KVStore, Sized
from pdkv.kv_store.recent_keys import RecentKeys
from pdkv.kv_store.tier import Tier, WritePolicy

logger = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
"""Copied at a time, one value at least: all that is on its way."""

MAX_QUEUED = 4096
"""Values that wait to be copied; beyond it one is left for its next use."""

COLD_SHARE = 8
"""One part in so many of host memory, the one that goes first, is copied before it goes."""

WRITTEN_FOR_S = 60.0
"""So long a value is believed to be where it was written; then the tier is asked."""

JOIN_TIMEOUT_S = 5.0


class Backfill:
    """Copies behind everybody's back, by one thread that begins with the first copy. Nobody waits for it.

    What is gone from the source before its turn is not copied: that costs a miss later.
    """

    def __init__(
        self,
        source: KVStore,
        tiers: Sequence[Tier],
        put: Callable[[Tier, Sequence[Item]], bool],
        delete: Callable[[Tier, Sequence[bytes]], object],
    ) -> None:
        """`put` writes what a tier lacks, and says whether the tier has all of it now. Neither raises StoreError."""
        self._source = source
        self._put = put
        self._delete = delete
        self._tiers = {policy: [t for t in tiers if t.write == policy] for policy in ("second-use", "evicted")}
        self._written = RecentKeys(WRITTEN_FOR_S)
        self._changed = threading.Condition()  # its lock guards what follows
        self._used: OrderedDict[bytes, int] = OrderedDict()  # sizes of values that were used again
        self._looks = False  # the source has less room than before
        self._copying: set[bytes] = set()
        self._deleted: set[bytes] = set()  # of these, while they were being copied
        self._stopping = False
        self._thread: threading.Thread | None = None

    def used(self, items: Iterable[Sized]) -> None:
        """The source has these values, and they were read."""
        if not self._tiers["second-use"]:
            return
        new = [(key, size) for key, size in items if key not in self._written]
        with self._changed:
            for key, size in new[: max(MAX_QUEUED - len(self._used), 0)]:
                self._used[key] = size
            if self._used:
                self._wake()

    def room_taken(self) -> None:
        """Something was put into the source."""
        if self._tiers["evicted"]:
            with self._changed:
                self._looks = True
                self._wake()

    def forget(self, keys: Iterable[bytes]) -> None:
        """These values are deleted: they are not to come again by a copy under way. Called before they are."""
        with self._changed:
            for key in keys:
                self._used.pop(key, None)
                self._written.discard(key)
                if key in self._copying:
                    self._deleted.add(key)

    def close(self) -> None:
        """End the thread, with the call of a tier that is under way. Idempotent."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("thread %s does not end", self._thread.name)

    def _wake(self) -> None:
        if self._thread is None and not self._stopping:
            self._thread = threading.Thread(target=self._serve, name="pdkv-backfill", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not (self._used or self._looks or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                used = _take_batch(self._used)
                looks, self._looks = self._looks, False
            try:
                self._copy(used, "second-use")
                if looks:
                    self._copy_coldest()
            except Exception:  # the thread goes on with what comes next
                logger.exception("KV store: values were not copied into a slower tier")

    def _copy_coldest(self) -> None:
        """What goes first and is not in the slower tiers yet; goes on as long as there is some, for it moves."""
        window = self._source.count_held().capacity // COLD_SHARE
        cold = OrderedDict(item for item in self._source.coldest(window) if item[0] not in self._written)
        batch = _take_batch(cold)
        self._copy(batch, "evicted")
        if cold and all(key in self._written for key, _ in batch):
            with self._changed:
                self._looks = True

    def _copy(self, batch: Sequence[Sized], policy: WritePolicy) -> None:
        if not batch:
            return
        with self._changed:
            self._copying = {key for key, _ in batch}
            self._deleted = set()
        items = self._read(batch)
        are_put = [self._put(tier, items) for tier in self._tiers[policy]] if items else [False]
        if all(are_put):
            for key, _ in items:
                self._written.add(key)
        with self._changed:
            deleted = sorted(self._deleted)
            self._copying = set()
        if deleted:
            self._take_back(deleted, policy)

    def _read(self, batch: Sequence[Sized]) -> list[Item]:
        memory = memoryview(bytearray(sum(size for _, size in batch)))
        buffers, end = [], 0
        for _, size in batch:
            buffers.append(memory[end : end + size])
            end += size
        keys = [key for key, _ in batch]
        found = self._source.peek(keys, buffers)
        return [item for item, is_found in zip(zip(keys, buffers, strict=True), found, strict=True) if is_found]

    def _take_back(self, keys: Sequence[bytes], policy: WritePolicy) -> None:
        """Delete again what was deleted while it was being written."""
        for key in keys:
            self._written.discard(key)
        for tier in self._tiers[policy]:
            self._delete(tier, keys)


def _take_batch(queue: OrderedDict[bytes, int]) -> list[Sized]:
    """The first ones, BATCH_BYTES of them; they are no longer in the queue."""
    batch: list[Sized] = []
    num_bytes = 0
    while queue:
        size = next(iter(queue.values()))
        if batch and num_bytes + size > BATCH_BYTES:
            break
        batch.append(queue.popitem(last=False))
        num_bytes += size
    return batch
