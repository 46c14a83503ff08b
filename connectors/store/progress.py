"""The progress of a load: which of its first tokens are in their blocks, and whether a forward pass may continue."""

import threading
from collections.abc import Sequence

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.store.plan import StoreLoad, Value
from pdkv.errors import KVNotFound, TransferTimeout


class LoadProgress:
    """One rank's part of a load, counted by its I/O threads. Values after a gap are useless.

    Args:
        num_parts: of each value on this rank.
    """

    def __init__(self, load: StoreLoad, num_parts: int) -> None:
        self.num_damaged = 0
        self.num_expired = 0
        self.ends_at = 0  # of the value that ends first
        self._load = load
        self._num_open = {(value.start, value.group): num_parts for value in load.values}
        self._gap = load.stop
        self._is_late = False
        self._lock = threading.Lock()

    @property
    def code(self) -> str:
        """Why the load is incomplete: a value is missing, or there was no time for it; empty: no error so far."""
        if self._gap == self._load.stop:
            return ""
        return TransferTimeout.code if self._is_late else KVNotFound.code

    def wants(self, value: Value) -> bool:
        """Whether the value is still useful, as far as is known."""
        return value.start < self._gap

    def filled(self, value: Value, ends_at: int = 0) -> None:
        """Note that one part of the value that ends at `ends_at` is in its blocks."""
        with self._lock:
            self._num_open[value.start, value.group] -= 1
            self.ends_at = min(filter(None, (self.ends_at, ends_at)), default=0)

    def missed(self, values: Sequence[Value], num_damaged: int, num_expired: int = 0) -> None:
        """Note values that cannot be read, some because they did not match what was saved, or have expired."""
        with self._lock:
            self.num_damaged += num_damaged
            self.num_expired += num_expired
            self._gap = min([self._gap, *(value.start for value in values)])

    def give_up(self, start: int) -> None:
        """Give up the values from token `start` on for lack of time."""
        with self._lock:
            self._is_late = self._is_late or start < self._gap
            self._gap = min(self._gap, start)

    @property
    def num_tokens(self) -> int:
        """Number of the load's first tokens with all parts in their blocks."""
        with self._lock:
            stop = next((start for (start, _), num_open in self._num_open.items() if num_open), self._load.stop)
            return max(min(stop, self._gap) - self._load.start, 0)


class LayerLoad:
    """A load that the forward pass waits for, stage by stage."""

    def __init__(self, num_jobs: Sequence[int], clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._num_open = list(num_jobs)  # by stage
        self._failed = False
        self._changed = threading.Condition()

    def done(self, stage: int) -> None:
        """Note that a job of that stage has filled its blocks."""
        with self._changed:
            self._num_open[stage] -= 1
            self._changed.notify_all()

    def fail(self) -> None:
        """Note that the rest of the load will not come."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    @property
    def failed(self) -> bool:
        """Whether the rest of the load will not come."""
        return self._failed

    def wait(self, stage: int, until: float) -> bool:
        """Wait until the stage's layers have arrived or the load has failed, at most until the clock shows `until`.
        Returns whether that happened.
        """
        with self._changed:
            return self._clock.wait_for(self._changed, lambda: self._failed or not self._num_open[stage], until)
