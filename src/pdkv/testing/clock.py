"""A clock that a test moves, so that a deadline passes without any delay."""

import asyncio
import contextvars
import functools
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Condition, Event, Timer
from typing import Any, TypeVar, cast

import uvloop

from pdkv.base.clock import Clock, Handle

T = TypeVar("T")

REAL_LIMIT_S = 60.0
"""Seconds, by the machine's clock, for which `until_waiting` waits for threads."""

_TURNS = 10
"""Turns of an event loop between two moves of `passing`, so that what a call has begun comes to its end."""


@dataclass(eq=False, slots=True)
class _Waiter:
    condition: Condition
    until: float


@dataclass(order=True, slots=True)
class _Call:
    at: float
    number: int
    call: Callable[[], None] | None = field(compare=False)
    loop: asyncio.AbstractEventLoop | None = field(compare=False)

    def cancel(self) -> None:
        self.call = None


class VirtualClock(Clock):
    """Stands still until `advance`. Threads that wait on it wake when their event comes or their time is reached."""

    def __init__(self, start: float = 1000.0) -> None:
        """`start`: its initial time in seconds."""
        super().__init__()
        self.now = self._read
        self._time = start
        self._waiters: list[_Waiter] = []
        self._calls: list[_Call] = []
        self._numbers = count()
        self._changed = Condition()  # its lock guards all of this

    def _read(self) -> float:
        return self._time

    def wait(self, event: Event | Condition, until: float | None = None) -> bool:
        if until is None:
            return event.wait()
        if isinstance(event, Condition):
            return self._wait(event, until)
        condition = cast(Condition, event._cond)  # type: ignore[attr-defined]
        with condition:
            while not event.is_set() and self._time < until:
                self._wait(condition, until)
            return event.is_set()

    def call_at(self, at: float, call: Callable[[], None]) -> Handle:
        """Call `call()` when `advance` reaches `at`: on the event loop running now, or else where `advance` is
        called.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        with self._changed:
            planned = _Call(at, next(self._numbers), call, loop)
            heapq.heappush(self._calls, planned)
        return planned

    def advance(self, seconds: float) -> None:
        """Advance the time. Planned calls are made in order, each at its own time; then waiting threads wake."""
        with self._changed:
            end = self._time + seconds
        while (planned := self._next_call(end)) is not None:
            if planned.call is not None:
                _call(planned)
        with self._changed:
            self._time = end
            due = [waiter for waiter in self._waiters if waiter.until <= end]
            self._waiters = [waiter for waiter in self._waiters if waiter.until > end]  # those that wait no more
        for waiter in due:
            with waiter.condition:
                waiter.condition.notify_all()

    async def passing(self, awaitable: Awaitable[T], within_s: float = 3600.0) -> T:
        """Await something that ends by a deadline: the time moves to the next planned call, and again after turns of
        the loop.

        Raises:
            TimeoutError: it has not ended before a call planned for later than `within_s` from now.
        """
        task, end = asyncio.ensure_future(awaitable), self._time + within_s
        while not task.done():
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            with self._changed:
                at = min((planned.at for planned in self._calls if planned.call is not None), default=self._time)
            if at > end:
                task.cancel()
                raise TimeoutError(f"no end within {within_s:g} s of the clock")
            self.advance(max(at - self._time, 0.0))
        return await task

    def until_waiting(self, num_threads: int = 1) -> None:
        """Wait until this many threads wait with a deadline, so that `advance` finds them waiting.

        Raises:
            TimeoutError: they do not within REAL_LIMIT_S of the machine's time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._waiters) >= num_threads, REAL_LIMIT_S):
                raise TimeoutError(f"{len(self._waiters)} threads are waiting on this clock, expected {num_threads}")

    def _wait(self, condition: Condition, until: float) -> bool:
        """`condition` is held. Lock order: a condition, then `_changed`."""
        waiter = _Waiter(condition, until)
        with self._changed:
            if self._time >= until:
                return False
            self._waiters.append(waiter)
            self._changed.notify_all()
        try:
            condition.wait()
        finally:
            with self._changed:
                self._waiters = [other for other in self._waiters if other is not waiter]
        return self._time < until

    def _next_call(self, end: float) -> _Call | None:
        with self._changed:
            if not self._calls or self._calls[0].at > end:
                return None
            planned = heapq.heappop(self._calls)
            self._time = max(self._time, planned.at)
            return planned


def _call(planned: _Call) -> None:
    call, loop = cast(Callable[[], None], planned.call), planned.loop
    try:
        is_here = loop is None or loop is asyncio.get_running_loop()
    except RuntimeError:
        is_here = False
    if is_here:
        call()
    else:
        cast(asyncio.AbstractEventLoop, loop).call_soon_threadsafe(call)


class _VirtualTimers(asyncio.AbstractEventLoop):
    """Timers of an event loop, including `asyncio.timeout` and `asyncio.wait`, that run by a test's clock.

    Waits for files, threads and processes are not affected. `asyncio.sleep` ends when the test moves the clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()

    def time(self) -> float:
        """The clock's time."""
        return self.clock.now()

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Call it when the clock has advanced by this much."""
        return self.call_at(self.clock.now() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        """Call it when the clock shows `when`."""
        if when <= self.clock.now():
            return self.call_soon(callback, *args, context=context)
        call: Any = functools.partial((context or contextvars.copy_context()).run, callback, *args)
        return self.clock.call_at(when, call)

    def call_really_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Any:
        """`call_later` by the machine's clock: the time limit of a test."""
        timer = Timer(delay, self.call_soon_threadsafe, (callback, *args))
        timer.daemon = True
        timer.start()
        return timer


class VirtualLoop(_VirtualTimers, asyncio.SelectorEventLoop):  # type: ignore[misc]  # fewer named arguments
    """asyncio's event loop with timers by its `clock`, which stands still until a test moves it."""


class VirtualUvloop(_VirtualTimers, uvloop.Loop):  # type: ignore[misc]  # uvloop says other types than asyncio
    """The router's kind of event loop with such timers."""
