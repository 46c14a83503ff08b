"""Values on their way from one tier of a store into another, one staging buffer at a time.

A move copies all before it removes anything, and removes only what it has read back from its destination: whatever ends
it in between, no value is in neither place. What it copies may itself make room for more of the same prompt there; so
it looks again which values are there before it removes them, and copies nothing after that.
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
"""Raises where it has to stop."""

EachBuffer = Callable[[Sequence[Value], float, Callable[[list[Slot]], None], Check], None]
"""(values, deadline, use, check): for one staging buffer after the other, call `check`, lay this rank's parts of the
values out, and call `use` with them. Raises TransferTimeout behind the deadline, and what these raise.
"""


class BetweenTiers:
    """What one rank brings from tier to tier, on one thread.

    Args:
        values: of the store that consists of the tiers.
    """

    def __init__(self, values: SealedValues, each_buffer: EachBuffer, clock: Clock = MONOTONIC) -> None:
        self.num_damaged = 0  # values that were not what was saved
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
        """Read what the first tier lacks: tiers behind it copy there what they give.

        Args:
            kv_terms: on which they are copied.
            check: called between two buffers.

        Raises:
            TransferTimeout: not all of it within the deadline.
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
        """Put what the source has of the values, and this process may remove, into the destination; then remove it.

        Args:
            copy: remove nothing.
            kv_terms: of whose they are; those that a value has at the source stay its own.

        Returns:
            How many the destination has instead of the source; `copy`: besides it.

        Raises:
            TransferTimeout: not all of it within the deadline. Nothing has left the source then, as after any failure
                of the destination.
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
        """Copy what the destination lacks of the source's; the keys of what was read there and is whole."""
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
        with self._store.still(deadline - self._clock.now()):  # else a copy could bring back what is removed
            there = list(compress(keys, destination.contains(keys)))
            if self._clock.now() >= deadline:
                raise TransferTimeout("all was copied, and not removed in time")
            self._store.forget(there)
            return source.discard(there)

    def _read(self, slots: Sequence[Slot], part: KVStore | None = None, kv_terms: KVTerms | None = None) -> set[bytes]:
        """Read values from a tier, or from the first that has them; the keys of those that are whole."""
        whole: set[bytes] = set()
        if slots:
            reading = self._values.get(slots, lambda slot: whole.add(slot.key), kv_terms, part)
            self.num_damaged += reading.num_damaged
        return whole
