"""One store of several: what it takes, and what happened there."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from pdkv.kv_store.base import Item, KVStore
from pdkv.kv_store.read_meter import ReadMeter
from pdkv.kv_store.recent_keys import RecentKeys

WritePolicy = Literal["all", "second-use", "evicted"]
"""What a tier takes: all that is written; what is used again; what is about to make room in host memory."""


class Tier:
    """One store of several, and what happened there."""

    def __init__(self, store: KVStore, write: WritePolicy = "all") -> None:
        self.store = store
        self.write = write
        self.put_once = RecentKeys() if write == "second-use" else None  # keys that it was not given yet
        self.num_hits = 0
        self.meter = ReadMeter()
        self.num_backfilled = 0  # values that came to it behind everybody's back
        self.num_promoted = 0  # values that a slower tier had and this one now has
        self.failures: Counter[str] = Counter()  # by error code; "skipped": calls while it was left alone
        self.rests_until = 0.0

    def taken(self, items: Sequence[Item]) -> Sequence[Item]:
        """What it takes of what is put. Of what it waits for a second use of, it takes what it was offered before."""
        if self.put_once is None:
            return items if self.write == "all" else ()
        again = [item for item in items if item[0] in self.put_once]
        for key, _ in items:
            self.put_once.add(key)
        return again
