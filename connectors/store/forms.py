"""The forms in which each value is stored, and the choice of one for a load: CacheGen's adaptation (SIGCOMM '24,
section 5.3).
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.store.coding import ValueCoder
from pdkv.connectors.store.pieces import Piece
from pdkv.connectors.transfer.units import UnitPart, UnitPool

PACE_VALID_S = 10.0
"""Seconds for which a measured pace is trusted. Then the finest form is read again, even if nothing was loaded for lack
of time.
"""

_KEPT = 0.5  # weight of earlier reads in the average, with each read


class Pace:
    """How fast one thread has recently read and decoded. Threads may share it."""

    def __init__(self, now: Callable[[], float] = MONOTONIC.now) -> None:
        self._now = now
        self._bytes = self._seconds = self._last = 0.0
        self._lock = threading.Lock()

    def note(self, num_bytes: int, seconds: float) -> None:
        """Record a batch; an empty one makes the pace unknown."""
        if not num_bytes:
            return
        with self._lock:
            self._bytes = self._bytes * _KEPT + num_bytes
            self._seconds = self._seconds * _KEPT + seconds
            self._last = self._now()

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second; None: nothing was read recently."""
        with self._lock:
            if not self._bytes or self._now() - self._last > PACE_VALID_S:
                return None
            return self._bytes / max(self._seconds, 1e-9)


def choose_form(sizes: Sequence[int], bytes_per_s: float | None, left_s: float) -> int | None:
    """The first form that can be loaded in time, or the first one if no pace is known; None: not even the last one can.

    Args:
        sizes: bytes still to be loaded, by form, from the finest to the coarsest.
        left_s: until the deadline.
    """
    if bytes_per_s is None:
        return 0
    return next((form for form, size in enumerate(sizes) if size <= bytes_per_s * left_s), None)


class Forms:
    """The sizes of a rank's values' bodies in each form.

    Args:
        coder: None: bodies are the images of their units.
        forms: the finest first.
    """

    def __init__(self, pool: UnitPool, coder: ValueCoder | None, forms: Sequence[int]) -> None:
        self._pool = pool
        self._coder = coder
        self._forms = forms

    def body_bytes(self, part: UnitPart, form: int = 0) -> Callable[[int], int]:
        """Bytes of a body, from its units."""
        if self._coder is None:
            return self._pool.unit_bytes(part).__mul__
        return partial(self._coder.body_bytes, form, part)

    def all_sizes(self, parts: Sequence[UnitPart]) -> list[Callable[[int], int]]:
        """`body_bytes` of each part in all forms."""
        return [self.body_bytes(part, form) for part in parts for form in self._forms]

    def in_form(self, pieces: Sequence[Piece], form: int) -> list[Piece]:
        """The same values in another stored form."""
        return [piece._replace(form=form, body_bytes=self.body_bytes(piece.part.part, form)) for piece in pieces]

    def left(self, jobs: Sequence[Sequence[Piece]]) -> list[Sequence[int]]:
        """For each of a load's jobs, the bytes from that job to the load's end, by form; empty if there is only one
        form.
        """
        if len(self._forms) == 1:
            return [()] * len(jobs)
        left = [0 for _ in self._forms]
        told: list[Sequence[int]] = []
        for pieces in reversed(jobs):
            for form in self._forms:
                left[form] += sum(piece.num_bytes for piece in self.in_form(pieces, form))
            told.append(tuple(left))
        return told[::-1]
