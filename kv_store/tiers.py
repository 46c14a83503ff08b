"""Several stores as one, fastest first."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TypeVar

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import StoreError, StoreUnavailable
from pdkv.kv_store.backfill import Backfill
from pdkv.kv_store.base import (
    Arrived,
    Buffer,
    Item,
    KVStore,
    Lent,
    LockPages,
    Scattered,
    TellingStore,
    TermsOf,
    TierCounts,
    prefixes_of,
    put_all,
    tier_name,
)
from pdkv.kv_store.terms import NO_TERMS, Terms
from pdkv.kv_store.tier import CallKind, Tier, WritePolicy
from pdkv.kv_store.tier_watch import TierWatch

T = TypeVar("T")

LATE_S = 1.0
"""Seconds after which a call makes the watch probe the tier, whatever `retry_after_s` says."""


class TieredStore(TellingStore):
    """Reads ask the tiers in order, each for what is still missing, and copy a slower tier's hits into the faster ones.

    A tier's write policy says which values it takes. "all": all that are put. "second-use": values that are put again,
    and values read from a faster tier, which are copied in the background. "evicted": values about to be evicted from
    the first tier, which are copied beforehand. The first tier takes everything, so values are found until they are
    evicted there.

    Guarantees: `put` writes to the tiers that take it and succeeds if one that other processes see took the batch (if
    there is none, any tier); `get` and `contains` succeed if one of them answered; values that only a failing tier has
    are then misses. `delete` fails if any tier did: the value may still be there. Failures that no error tells are
    counted in `tiers`.

    A server that does not answer is found out by TierWatch and left alone, so that no call waits for it; of one that
    fails to be written, only writes are spared for a while, `retry_after_s` at first. Where all rest, calls fail.
    """

    def __init__(
        self,
        stores: Sequence[KVStore],
        retry_after_s: float = 1.0,
        *,
        write: Sequence[WritePolicy] = (),
        watches: bool = True,
        clock: Clock = MONOTONIC,
    ) -> None:
        """Owns the stores: `close` closes them. `write`: policy of each tier; empty: all take everything. `watches`:
        False: calls are awaited as long as they take, and rests end by time alone.
        """
        policies = write or ["all"] * len(stores)
        assert policies[0] == "all", policies
        self.tiers = [
            Tier(tier_name(place, store), store, policy, retry_after_s, watches=watches, clock=clock)
            for place, (store, policy) in enumerate(zip(stores, policies, strict=True))
        ]
        self._lock = threading.Lock()  # of the tiers' state
        self._clock = clock
        self._is_closed = False
        self._watch = TierWatch(self.tiers, self._lock, max(retry_after_s, LATE_S), clock)
        shared = [tier for tier in self.tiers if tier.store.is_shared] or self.tiers
        reaching_all = [tier for tier in shared if tier.write == "all" and not tier.store.scope]
        self._shared = reaching_all or shared
        self.scope = self._shared[0].store.scope
        lazy = [] if not self.tiers[0].is_near else self.tiers[1:]
        self._backfill = Backfill(stores[0], lazy, self._fill, self._take_back, clock) if lazy else None

    @property
    def asks_key_by_key(self) -> bool:
        return any(tier.store.asks_key_by_key for tier in self.tiers)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        self._look_up(found, lambda tier, missing: tier.store.contains([keys[i] for i in missing]))
        return found

    def count_prefixes(self, chains: Sequence[Sequence[bytes]]) -> list[int]:
        keys = [(number, key) for number, chain in enumerate(chains) for key in chain]
        found = [False] * len(keys)

        def ask(tier: Tier, missing: list[int]) -> list[bool]:
            wanted = [keys[i] for i in missing]
            if not tier.store.asks_key_by_key:
                return tier.store.contains([key for _, key in wanted])
            left = [[key for _, key in part] for _, part in groupby(wanted, key=itemgetter(0))]
            counts = tier.store.count_prefixes(left)
            return [i < count for chain, count in zip(left, counts, strict=True) for i in range(len(chain))]

        self._look_up(found, ask)
        return prefixes_of(chains, found)

    def contains_for_all(self, keys: Sequence[bytes]) -> list[bool]:
        found = [False] * len(keys)
        self._look_up(found, lambda tier, missing: tier.store.contains([keys[i] for i in missing]), self._shared)
        return found

    def read(self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived) -> list[bool]:
        return self.read_on_terms(keys, out, arrived, lambda index: NO_TERMS)

    def read_on_terms(
        self, keys: Sequence[bytes], out: Sequence[Buffer], arrived: Arrived, terms_of: TermsOf
    ) -> list[bool]:
        found = [False] * len(keys)

        def read(tier: Tier, missing: list[int]) -> list[bool]:
            wanted, buffers = [keys[i] for i in missing], [out[i] for i in missing]
            with tier.meter.reading():
                return tier.store.read(wanted, buffers, lambda index, stop: arrived(missing[index], stop))

        for tier, hits in self._look_up(found, read):
            with self._lock:
                tier.num_hits += len(hits)
            tier.meter.add(sum(out[i].nbytes for i in hits))
            if tier is not self.tiers[0] or self._backfill is not None:
                terms = {keys[i]: terms for i in hits if (terms := terms_of(i)) != NO_TERMS}
                self._copy(tier, [(keys[i], out[i]) for i in hits], terms)
        return found

    @property
    def can_scatter(self) -> bool:
        return self.tiers[0].store.can_scatter

    def read_scattered(
        self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived, terms_of: TermsOf
    ) -> list[bool]:
        tier = self.tiers[0]
        if tier.rests("read"):
            return [False] * len(keys)
        with tier.meter.reading():
            found = self._try(tier, partial(tier.store.read_scattered, keys, out, arrived, terms_of), [])
        hits = [(i, len(out[i])) for i, is_found in enumerate(found or ()) if is_found]
        with self._lock:
            tier.num_hits += len(hits)
        tier.meter.add(sum(size for _, size in hits))
        if self._backfill is not None:
            terms = {keys[i]: terms for i, _ in hits if (terms := terms_of(i)) != NO_TERMS}
            self._backfill.used(((keys[i], size) for i, size in hits), terms)
        return found or [False] * len(keys)

    def lock_pages(self, lock: LockPages) -> None:
        self.tiers[0].store.lock_pages(lock)

    def lend(self, key: bytes) -> Lent | None:
        tier = self.tiers[0]
        lent = None if tier.rests("read") else self._try(tier, partial(tier.store.lend, key), [])
        return None if lent is None else lent._replace(is_there=partial(self._was_read, key, lent))

    def _was_read(self, key: bytes, lent: Lent) -> bool:
        """Whether a lent value was still there when it had been read; then it counts, and may be copied to others."""
        tier, size = self.tiers[0], len(lent.view)
        if not lent.is_there():
            return False
        with self._lock:
            tier.num_hits += 1
        tier.meter.add(size)
        if self._backfill is not None:
            self._backfill.used([(key, size)], tier.store.terms_of([key]))
        return True

    def put(self, items: Sequence[Item]) -> None:
        self.put_on_terms(items, {})

    def put_on_terms(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        errors: list[StoreError] = []
        is_put = False
        for tier in self._awake("write"):
            taken = tier.taken(items)
            if not taken:
                continue
            num_errors = len(errors)
            self._try(tier, partial(put_all, tier.store, taken, terms), errors, "write")
            is_put = is_put or (len(errors) == num_errors and tier in self._shared and len(taken) == len(items))
        if items and not is_put:
            raise errors[0] if errors else self._left_alone(self._shared)

    def keep(self, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        """Put values into the first tier; a background thread copies them to the others."""
        errors: list[StoreError] = []
        if self._backfill is not None and not self.tiers[0].rests("write"):
            self._try(self.tiers[0], partial(put_all, self.tiers[0].store, items, terms), errors, "write")
        if errors or self._backfill is None or self.tiers[0].rests("write"):
            self.put_on_terms(items, terms)
            return
        for policy in ("all", "second-use"):
            takers = [taken for tier in self.tiers[1:] if tier.write == policy and (taken := tier.taken(items))]
            if takers:
                self._backfill.offer(((key, value.nbytes) for key, value in takers[0]), terms, policy)

    def ask_part(self, part: KVStore, call: Callable[[], T], *, writes: bool = False) -> T:
        tier = next(tier for tier in self.tiers if tier.store is part)
        kind: CallKind = "write" if writes else "read"
        if tier.rests(kind):
            raise self._left_alone([tier])
        errors: list[StoreError] = []
        result = self._try(tier, call, errors, kind)
        if errors:
            raise errors[0]
        return result  # type: ignore[return-value]  # None only if it is what the call returns

    def hang_up(self, *, for_good: bool = False) -> None:
        for tier in self.tiers:
            tier.store.hang_up(for_good=for_good)

    @property
    def problem(self) -> str:
        found = [(tier.name, tier.away) for tier in self.tiers]  # another thread may hear from one meanwhile
        return "; ".join(f"{name} does not answer: {away}" for name, away in found if away is not None)

    def on_problem(self, tell: Callable[[], None]) -> None:
        self._watch.tell = tell

    def forget(self, keys: Sequence[bytes] | None) -> None:
        if self._backfill is not None:
            self._backfill.forget(keys)

    def still(self, timeout_s: float) -> AbstractContextManager[None]:
        return self._backfill.still(timeout_s) if self._backfill is not None else nullcontext()

    def put_into(self, part: KVStore, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        part.put_on_terms(items, terms)
        if part is self.tiers[0].store and self._backfill is not None:
            self._backfill.room_taken()

    def delete(self, keys: Sequence[bytes]) -> None:
        self.forget(keys)
        errors: list[StoreError] = []
        awake = self._awake("write")
        for tier in awake:
            self._try(tier, partial(tier.store.delete, keys), errors, "write")
        if errors:
            raise errors[0]
        if len(awake) < len(self.tiers):
            raise StoreUnavailable("a tier that failed recently was not asked to delete")

    @property
    def look_ahead_bytes(self) -> int:
        return self.tiers[0].store.look_ahead_bytes

    def expect(self, keys: Sequence[bytes]) -> None:
        self.tiers[0].store.expect(keys)

    def unexpect(self, keys: Sequence[bytes]) -> None:
        self.tiers[0].store.unexpect(keys)

    def count_damaged(self) -> int:
        return sum(tier.store.count_damaged() for tier in self.tiers)

    def count_tiers(self) -> Mapping[str, TierCounts]:
        """Counts named by place and kind: 0-memory, 1-file, …"""
        with self._lock:
            return {
                t.name: TierCounts(t.num_hits, t.failures.total(), t.store.count_held(), t.meter.total)
                for t in self.tiers
            }

    def parts(self) -> Mapping[str, KVStore]:
        return {tier.name: tier.store for tier in self.tiers}

    def close(self) -> None:
        self._is_closed = True
        self.hang_up(for_good=True)  # what copies, or probes, does not wait for an answer
        if self._backfill is not None:
            self._backfill.close()
        self._watch.close()
        for tier in self.tiers:
            tier.store.close()

    def _look_up(
        self, found: list[bool], ask: Callable[[Tier, list[int]], list[bool]], among: Sequence[Tier] | None = None
    ) -> list[tuple[Tier, list[int]]]:
        """Ask tier by tier (None: all) and note what is found; returns (tier, indices) of each tier's hits."""
        hits_by_tier: list[tuple[Tier, list[int]]] = []
        errors: list[StoreError] = []
        awake = self._awake("read", among)
        for tier in awake:
            missing = [i for i, is_found in enumerate(found) if not is_found]
            if not missing:
                break
            answers = self._try(tier, partial(ask, tier, missing), errors)
            hits = [i for i, is_found in zip(missing, answers or (), strict=False) if is_found]
            for i in hits:
                found[i] = True
            if hits:
                hits_by_tier.append((tier, hits))
        if len(errors) == len(awake) and not all(found):
            raise errors[0] if errors else self._left_alone(among or self.tiers)
        return hits_by_tier

    def _copy(self, found_in: Tier, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> None:
        """Copy values into all faster tiers, except for one that gets evicted values from the first tier; and offer
        them to slower ones.
        """
        for tier in self._awake("write", self.tiers[: self.tiers.index(found_in)]):
            if tier.write != "evicted":
                self._try(tier, partial(put_all, tier.store, items, terms), [], "write")
        if self._backfill is not None:
            self._backfill.used(((key, value.nbytes) for key, value in items), terms)

    def _fill(self, tier: Tier, items: Sequence[Item], terms: Mapping[bytes, Terms]) -> bool:
        """Write what a tier lacks; returns whether it has everything now. On the copying thread."""
        if not self._awake("write", [tier]):
            return False
        errors: list[StoreError] = []
        there = self._try(tier, lambda: tier.store.contains([key for key, _ in items]), errors) or ()
        missing = [item for item, is_there in zip(items, there, strict=False) if not is_there]
        if missing:
            self._try(tier, partial(put_all, tier.store, missing, terms), errors, "write")
        return not errors

    def _take_back(self, tier: Tier, keys: Sequence[bytes]) -> None:
        self._try(tier, partial(tier.store.delete, keys), [], "write")

    def _awake(self, kind: CallKind, among: Sequence[Tier] | None = None) -> list[Tier]:
        """The tiers (None: of all) to ask now; counts those that are left alone."""
        now = self._clock.now()
        awake = []
        for tier in self.tiers if among is None else among:
            if tier.rests(kind, now):
                with self._lock:
                    tier.failures["skipped"] += 1
            else:
                awake.append(tier)
        return awake

    def _left_alone(self, tiers: Sequence[Tier]) -> StoreUnavailable:
        names = ", ".join(tier.name for tier in tiers)
        why = "closed" if self._is_closed else "left alone after a recent failure"
        return StoreUnavailable(f"{names}: {why}")

    def _try(self, tier: Tier, call: Callable[[], T], errors: list[StoreError], kind: CallKind = "read") -> T | None:
        """The result of the call; None if the tier failed, which is counted and added to `errors`."""
        problem: StoreError | None = None
        with self._lock:
            number = self._watch.begin(tier)
        try:
            return call()
        except StoreError as error:
            problem = error
            errors.append(error)
            return None
        finally:
            with self._lock:
                self._watch.end(tier, number, kind, problem)
                if problem is not None:
                    tier.failures[problem.code] += 1
            if kind == "write" and tier is self.tiers[0] and self._backfill is not None:
                self._backfill.room_taken()
