"""The time of a process: an object with deadlines is given a `Clock` when it is built, and reads no other clock.

Deadlines are times of that clock, in seconds. A decision is based on the difference of two readings of one clock. Wall
clock time (`unix_time`) is for records that people read, and for times to live, which are compared between hosts.
"""

import asyncio
import time
from collections.abc import Callable
from threading import Condition, Event
from typing import Protocol


class Handle(Protocol):
    """A call planned by `Clock.call_at`."""

    def cancel(self) -> None:
        """Cancel the call. Idempotent."""


class Clock:
    """The machine's monotonic clock. Tests use `pdkv.testing.VirtualClock`."""

    def __init__(self) -> None:
        self.now: Callable[[], float] = time.monotonic
        """Seconds since a moment in the past that is the same for all processes of the machine."""

    def wait(self, event: Event | Condition, until: float | None = None) -> bool:
        """Block until the event is set, the (held) condition is notified, or the clock shows `until`.

        Returns:
            False: `until` came first. A condition must be checked again in either case.
        """
        return event.wait(None if until is None else max(until - self.now(), 0.0))

    def wait_for(self, condition: Condition, is_met: Callable[[], bool], until: float | None = None) -> bool:
        """Block until `is_met()` under the (held) condition, which is notified of changes; returns False if that does
        not happen by `until`.
        """
        while not (met := is_met()) and (until is None or self.now() < until):
            self.wait(condition, until)
        return met

    def sleep(self, seconds: float) -> None:
        """Block for this long; for pauses that no event can end."""
        self.wait(Event(), self.now() + seconds)

    async def pause(self, seconds: float) -> None:
        """Like `sleep`, for a task of the running event loop."""
        over = asyncio.Event()
        handle = self.call_at(self.now() + seconds, over.set)
        try:
            await over.wait()
        finally:
            handle.cancel()

    def call_at(self, at: float, call: Callable[[], None]) -> Handle:
        """Call `call()` on the running event loop when the clock shows `at`."""
        loop = asyncio.get_running_loop()
        return loop.call_later(max(at - self.now(), 0.0), call)


MONOTONIC = Clock()
"""The default clock."""

unix_time: Callable[[], float] = time.time
"""Seconds since 1970, by the host's clock."""

unix_time_ns: Callable[[], int] = time.time_ns
"""Nanoseconds since 1970, by the host's clock."""
