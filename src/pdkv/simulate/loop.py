"""An event loop whose time is virtual: each call is made at its time, in the order (time, number); nothing waits."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

from pdkv.base.clock import Clock
from pdkv.errors import PdkvError

T = TypeVar("T")


class VirtualTime(asyncio.AbstractEventLoop):
    """Runs one coroutine with all that it starts, in one thread. There are no files, sockets, threads or processes."""

    def __init__(self) -> None:
        self._now = 0.0
        self.clock = Clock()
        """The same time, for what is given a clock."""
        self.clock.now = self.time
        self._calls: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = count()

    def time(self) -> float:
        """Seconds since the beginning."""
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        """Call it behind what is due now."""
        return self.call_at(self._now, callback, *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        """Call it when this many seconds have passed."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        """Call it at that time; behind what is due now if it has passed."""
        when = max(when, self._now)
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._calls, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> Any:
        """A future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **kwargs: Any) -> Any:
        """A task of this loop."""
        return asyncio.Task(coro, loop=self, **kwargs)

    def get_debug(self) -> bool:
        """Always False."""
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Raise what a call raised, since a simulation that lost an event is void. Tasks may outlive the run."""
        if (error := context.get("exception")) is not None:
            raise error

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end; what is planned for later is dropped.

        Raises:
            PdkvError: nothing is left to happen before it ends.
        """
        task = self.create_task(main)
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                if not self._calls:
                    raise PdkvError("the simulation stands still: nothing is left to happen")
                self._now, _, handle = heapq.heappop(self._calls)
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        result: T = task.result()
        return result

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Ignore it: a cancelled call is dropped at its time."""
