"""Waiting until something is true of the engines and of what they have to do."""

import asyncio
from collections.abc import Callable


class Changes:
    """Says that something has changed to whoever waits for it. Lives in one event loop."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something has changed; costs nothing where nobody waits."""
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
