"""Several stores as one, fastest first."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from pdkv.errors import StoreError, StoreTimeout, StoreUnavailable
from pdkv.kv_store.base import Arrived, Buffer, KVStore, TellingStore, TierCounts

T = TypeVar("T")


class Tier:
    """One store of several, and what happened there."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.num_hits = 0
        self.num_promoted = 0  # values that a slower tier had and this one now has
        self.failures: Counter[str] = Counter()  # by error code; "skipped": calls while it was left alone
        self.rests_until = 0.0


class TieredStore(TellingStore):
    """Reads ask the tiers in order, each for what is still missing, and copy a slower tier's hits into the faster ones.

    What is promised: `put` writes to all tiers and succeeds if one of them took the batch that other processes see, too
    (where there is none, any tier); `get` and `contains` succeed if one of them answered; what a failing tier would
    have had is then a miss. `delete` fails if any tier did: the value may still be there. Failures that no error tells
    are counted in `tiers`.

    A tier that was unavailable or too slow is left alone for `retry_after_s`, so that its timeout is not paid by each
    call. If all are, all are asked.
    """

    def __init__(self, stores: Sequence[KVStore], retry_after_s: float = 1.0) -> None:
        """Takes the stores over: `close` closes them."""
        self.tiers = [Tier(store) for store in stores]
        self._retry_after_s = retry_after_s
        self._lock = threading.Lock()  # of the tiers' counters
        self._shared = [tier for tier in self.tiers if tier.store.is_shared] or self.tiers

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        self._look_up(found, lambda tier, missing: tier.store.contains([keys[i] for i in missing]))
        return found

    def contains_for_all(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        self._look_up(found, lambda tier, missing: tier.store.contains([keys[i] for i in missing]), self._shared)
        return found

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        found = [False] * len(keys)

        def read(tier: Tier, missing: list[int]) -> list[bool]:
            wanted, buffers = [keys[i] for i in missing], [out[i] for i in missing]
            return tier.store.read(wanted, buffers, lambda index, stop: arrived(missing[index], stop))

        for depth, hits in self._look_up(found, read):
            with self._lock:
                self.tiers[depth].num_hits += len(hits)
            self._promote([(keys[i], out[i]) for i in hits], depth)
        return found

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        errors: list[StoreError] = []
        is_put = False
        for tier in self._awake():
            num_errors = len(errors)
            self._try(tier, partial(tier.store.put, items), errors)
            is_put = is_put or (len(errors) == num_errors and tier in self._shared)
        if not is_put:
            raise errors[0] if errors else StoreUnavailable("the tiers that others see failed a moment ago")

    def delete(self, keys: Sequence[bytes]) -> None:
        errors: list[StoreError] = []
        awake = self._awake()
        for tier in awake:
            self._try(tier, partial(tier.store.delete, keys), errors)
        if not errors and len(awake) < len(self.tiers):
            raise StoreUnavailable("a tier that failed a moment ago was not asked to delete")
        if errors:
            raise errors[0]

    def count_damaged(self) -> int:
        return sum(tier.store.count_damaged() for tier in self.tiers)

    def count_tiers(self) -> Mapping[str, TierCounts]:
        """Named by place and kind: 0-memory, 1-file, …"""
        with self._lock:
            return {
                f"{place}-{type(tier.store).__name__.removesuffix('Store').lower()}": TierCounts(
                    tier.num_hits, tier.failures.total(), tier.store.count_held()
                )
                for place, tier in enumerate(self.tiers)
            }

    def close(self) -> None:
        for tier in self.tiers:
            tier.store.close()

    def _look_up(
        self,
        found: list[bool],
        ask: Callable[[Tier, list[int]], list[bool]],
        among: Sequence[Tier] | None = None,
    ) -> list[tuple[int, list[int]]]:
        """Ask tier by tier (None: all) and note what is found; returns (tier, indices) of each tier's hits."""
        hits_by_tier: list[tuple[int, list[int]]] = []
        errors: list[StoreError] = []
        awake = [tier for tier in self._awake() if among is None or tier in among]
        for tier in awake:
            missing = [i for i, is_found in enumerate(found) if not is_found]
            if not missing:
                break
            answers = self._try(tier, partial(ask, tier, missing), errors)
            hits = [i for i, is_found in zip(missing, answers or (), strict=False) if is_found]
            for i in hits:
                found[i] = True
            if hits:
                hits_by_tier.append((self.tiers.index(tier), hits))
        if errors and len(errors) == len(awake):
            raise errors[0]
        return hits_by_tier

    def _promote(self, items: Sequence[tuple[bytes, Buffer]], depth: int) -> None:
        for tier in self._awake():
            if self.tiers.index(tier) < depth:
                errors: list[StoreError] = []
                self._try(tier, partial(tier.store.put, items), errors)
                with self._lock:
                    tier.num_promoted += 0 if errors else len(items)

    def _awake(self) -> list[Tier]:
        """Tiers to ask now; counts those that are left alone."""
        now = time.monotonic()
        with self._lock:
            awake = [tier for tier in self.tiers if tier.rests_until <= now]
            if not awake:
                return self.tiers
            for tier in self.tiers:
                if tier.rests_until > now:
                    tier.failures["skipped"] += 1
            return awake

    def _try(self, tier: Tier, call: Callable[[], T], errors: list[StoreError]) -> T | None:
        """What the call returns; None if the tier failed, which is counted and added to `errors`."""
        try:
            return call()
        except StoreError as error:
            errors.append(error)
            with self._lock:
                tier.failures[error.code] += 1
                if isinstance(error, (StoreUnavailable, StoreTimeout)):
                    tier.rests_until = time.monotonic() + self._retry_after_s
            return None
