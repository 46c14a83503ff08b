"""Short garbage collections. A full one examines every object of a busy router for 30 ms or more, during which nothing
else runs.

So objects that survive a full collection are not examined again until the router is idle. Objects freed by reference
counting, as nearly all are, are not affected.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping

from pdkv.base.clock import MONOTONIC

PERIOD_S = 10.0

MAX_FROZEN_S = 900.0
"""Seconds after which a router that is never idle collects fully: dead cycles take memory."""


class ShortCollections:
    """Garbage collection of the process, from `start` to `close`."""

    def __init__(self, count: Callable[[], tuple[int, int]], clock: Callable[[], float] = MONOTONIC.now) -> None:
        """`count` returns how many requests are running, and how many have begun since the start."""
        self._count = count
        self._clock = clock
        self._last_count = (0, 0)
        self._frozen_at: float | None = None  # the first survivors since the last full collection
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start in the running event loop."""
        gc.callbacks.append(self._collected)
        self._tick()

    def close(self) -> None:
        """Leave garbage collection to Python again. Idempotent."""
        if self._handle is not None:
            self._handle.cancel()
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def look(self) -> None:
        """Collect fully if that is due: nothing runs, and nothing has begun since the last call."""
        count, last = self._count(), self._last_count
        self._last_count = count
        if self._frozen_at is None:
            return
        is_idle = count == last and count[0] == 0
        if is_idle or self._clock() - self._frozen_at > MAX_FROZEN_S:
            gc.unfreeze()
            gc.collect()  # and what survives is frozen
            self._frozen_at = None

    def _tick(self) -> None:
        self.look()
        self._handle = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            gc.freeze()
            if self._frozen_at is None:
                self._frozen_at = self._clock()
