"""Waiting until some condition on the engines and their work is true."""

import asyncio
from collections.abc import Callable


class Changes:
    """Notifies waiters that something has changed. Lives in one event loop."""

    def __init__(self) -> None:
        self.on_notify: Callable[[], None] = lambda: None
        """Called with each notification."""
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Wake the waiters; costs nothing if there are none."""
        self.on_notify()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait_for(self, check: Callable[[], bool], timeout_s: float) -> bool:
        """Return True as soon as `check` is true; False when it is not within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not check():
                    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._waiters.add(waiter)
                    try:
                        await waiter
                    finally:
                        self._waiters.discard(waiter)
        except TimeoutError:
            return check()
        return True
