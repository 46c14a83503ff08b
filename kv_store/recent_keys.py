"""Keys that were seen lately, in memory of fixed size."""

from array import array
from collections.abc import Callable
from math import inf

from pdkv.base.clock import MONOTONIC

_NUM_SLOTS = 1 << 16  # 1 MiB


class RecentKeys:
    """A table with one place for each key: another key that has the same place takes it. Threads may share it.

    So a key may be forgotten early; two keys are practically never confused (64 bits of a hash).
    """

    def __init__(
        self, valid_for_s: float = inf, num_slots: int = _NUM_SLOTS, now: Callable[[], float] = MONOTONIC.now
    ) -> None:
        """`valid_for_s`: how long a key is remembered at most."""
        self._valid_for_s = valid_for_s
        self._now = now
        self._hashes = array("q", bytes(8 * num_slots))
        self._times = array("d", bytes(8 * num_slots))

    def add(self, key: bytes) -> None:
        """Note that the key was seen now."""
        number = hash(key)
        slot = number % len(self._hashes)
        self._hashes[slot], self._times[slot] = number, self._now()

    def discard(self, key: bytes) -> None:
        """Forget the key, if it is known."""
        if key in self:
            self._hashes[hash(key) % len(self._hashes)] = 0

    def clear(self) -> None:
        """Forget all."""
        self._times = array("d", bytes(8 * len(self._times)))
        self._hashes = array("q", bytes(8 * len(self._hashes)))

    def __contains__(self, key: bytes) -> bool:
        number = hash(key)
        slot = number % len(self._hashes)
        return self._hashes[slot] == number and self._now() - self._times[slot] < self._valid_for_s
