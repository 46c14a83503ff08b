"""Tests that are coroutines, on an event loop of any kind and for a bounded time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from pdkv.testing import VirtualClock

T = TypeVar("T")
BOUND_S = 60.0
"""A coroutine that waits for longer waits for ever."""


def run(
    main: Coroutine[Any, Any, T], loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
) -> T:
    """Run a test's coroutine, on the router's kind of loop unless said; what waits for ever fails.

    Raises:
        TimeoutError: no end within BOUND_S of the machine's time, whatever the loop's timers count by.
    """

    async def bounded() -> T:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as bound:
            timer = getattr(loop, "call_really_later", loop.call_later)(BOUND_S, bound.reschedule, 0.0)
            try:
                return await main
            finally:
                timer.cancel()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(bounded())


def clock() -> VirtualClock:
    """That of the event loop that runs now, which is a virtual one."""
    return asyncio.get_running_loop().clock  # type: ignore[attr-defined]


class Turns:
    """Counts the turns of the event loop, from 1 on, within its block."""

    def __init__(self) -> None:
        self.number = 0

    async def __aenter__(self) -> "Turns":
        self._task = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _count(self) -> None:
        while True:
            self.number += 1
            await asyncio.sleep(0)
