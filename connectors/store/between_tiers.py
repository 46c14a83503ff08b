"""Values on their way from one tier of a store into another, one staging buffer at a time.

A move copies everything before it removes anything, and removes only values that it has read back from their
destination: whenever it is interrupted, each value is in at least one place. Copies may evict other values of the same
prompt at the destination; so the move checks again which values are there before it removes any, and copies nothing
after that.
"""

from collections.abc import Callable, Sequence
from itertools import compress

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.store.pieces import Slot
from pdkv.connectors.store.plan import Value
from pdkv.connectors.store.values import SealedValues
from pdkv.errors import TransferTimeout
from pdkv.kv_store.base import KVStore
from pdkv.wire.kv import KVTerms

Check = Callable[[], None]
"""Raises if the work must stop."""

EachBuffer = Callable[[Sequence[Value], float, Callable[[list[Slot]], None], Check], None]
"""(values, deadline, use, check): for one staging buffer after the other, call `check`, lay this rank's parts of the
values out, and call `use` with them. Raises TransferTimeout behind the deadline, and what these raise.
"""


class BetweenTiers:
    """Moves values from tier to tier for one rank, on one thread.

    Args:
        values: the values of the store that consists of the tiers.
    """

    def __init__(self, values: SealedValues, each_buffer: EachBuffer, clock: Clock = MONOTONIC) -> None:
        self.num_damaged = 0  # values that did not match what was saved
        self._values = values
        self._store = values.store
        self._each_buffer = each_buffer
        self._clock = clock

    def prefetch(
        self,
        values: Sequence[Value],
        first: KVStore,
        deadline: float,
        kv_terms: KVTerms | None = None,
        check: Check = lambda: None,
    ) -> None:
        """Read the values that the first tier lacks, which copies them there.

        Args:
            kv_terms: the terms of the copies.
            check: called between two buffers.

        Raises:
            TransferTimeout: the deadline passed before all was read.
        """

        def fetch(slots: list[Slot]) -> None:
            there = first.contains([slot.key for slot in slots])
            missing = [slot for slot, is_there in zip(slots, there, strict=True) if not is_there]
            self._read(missing, kv_terms=kv_terms)

        self._each_buffer(values, deadline, fetch, check)

    def move(
        self,
        values: Sequence[Value],
        source: KVStore,
        destination: KVStore,
        deadline: float,
        *,
        copy: bool,
        kv_terms: KVTerms | None = None,
    ) -> int:
        """Copy the source's values that this process may remove to the destination; then remove them.

        Args:
            copy: remove nothing.
            kv_terms: the terms of the values' owner; a value keeps the terms that it has at the source.

        Returns:
            The number of values moved or, with `copy`, copied.

        Raises:
            TransferTimeout: the deadline passed before all was moved. In this case, and if the destination fails,
                nothing has been removed from the source.
            StoreError: a tier failed.
        """
        sound: list[bytes] = []
        self._each_buffer(
            values,
            deadline,
            lambda slots: sound.extend(self._bring(slots, source, destination, kv_terms)),
            lambda: None,
        )
        if copy or not sound:
            return sum(destination.contains(sound))
        return self._take_out(sound, source, destination, deadline)

    def _bring(self, slots: list[Slot], source: KVStore, destination: KVStore, kv_terms: KVTerms | None) -> list[bytes]:
        """Copy what the destination lacks of the source's; returns the keys of intact values that were read there."""
        held = list(compress(slots, source.contains_own([slot.key for slot in slots])))
        there = self._read(held, destination)
        brought = self._read([slot for slot in held if slot.key not in there], source)
        if brought:
            moved = [slot for slot in held if slot.key in brought]
            terms = {**self._values.kept_on(moved, kv_terms), **source.terms_of([slot.key for slot in moved])}
            self._store.put_into(destination, [(slot.key, slot.view) for slot in moved], terms)
            there |= self._read(moved, destination)
        return [slot.key for slot in held if slot.key in there]

    def _take_out(self, keys: Sequence[bytes], source: KVStore, destination: KVStore, deadline: float) -> int:
        """Remove from the source what the destination still has; returns how many."""
        with self._store.still(deadline - self._clock.now()):  # otherwise a copy could bring back what is removed
            there = list(compress(keys, destination.contains(keys)))
            if self._clock.now() >= deadline:
                raise TransferTimeout("all values were copied, but not removed in time")
            self._store.forget(there)
            return source.discard(there)

    def _read(self, slots: Sequence[Slot], part: KVStore | None = None, kv_terms: KVTerms | None = None) -> set[bytes]:
        """Read values from a tier, or from the first that has them; returns the keys of intact values."""
        whole: set[bytes] = set()
        if slots:
            reading = self._values.get(slots, lambda slot: whole.add(slot.key), kv_terms, part)
            self.num_damaged += reading.num_damaged
        return whole
