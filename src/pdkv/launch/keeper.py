"""Keeps one process of a launch running, or all ranks of one engine, until it is told to stop."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import NamedTuple

from pdkv.base.clock import MONOTONIC
from pdkv.errors import PdkvError
from pdkv.launch.children import Child

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0
_STABLE_S = 60.0  # who lived this long starts again without a wait

logger = logging.getLogger(__name__)


def backoff_s(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1: 0.1, 0.2, 0.4 … 30."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16))


class Care(NamedTuple):
    """The functions that the owner of the processes provides to a keeper."""

    start: Callable[[], Awaitable[list[Child]]]  # starts all ranks; returns once they are ready
    end: Callable[[Collection[Child]], Awaitable[None]]  # ends them in order, within a limit
    kill: Callable[[Collection[Child]], Awaitable[None]]
    why: Callable[[int], str]  # an exit status in words
    on_ready: Callable[[str, float], None]  # name, seconds since its start was requested or its predecessor ended
    clock: Callable[[], float] = MONOTONIC.now


class Keeper:
    """Starts a router or all ranks of an engine again whenever one of them dies, which ends the others.

    Only a failure of the very first start is final, and raised by `ready`.
    """

    def __init__(self, name: str, care: Care) -> None:
        """Starts at once, in the running event loop."""
        loop = asyncio.get_running_loop()
        self.name = name
        self.ready: asyncio.Future[None] = loop.create_future()  # done when it is ready for the first time
        self._care = care
        self._wanted: asyncio.Future[None] | None = None  # a requested restart that has not begun
        self._starting: asyncio.Future[None] | None = None  # one that has begun
        self._interrupt = asyncio.Event()  # set with it
        self._task = asyncio.create_task(self._keep(), name=name)

    async def restart(self) -> None:
        """Stop the processes in order, and start them again; returns when they are ready.

        Raises:
            PdkvError: they did not start; the keeper goes on trying.
        """
        if self._wanted is None:
            self._wanted = asyncio.get_running_loop().create_future()
            self._interrupt.set()
        await asyncio.shield(self._wanted)

    async def cancel(self) -> None:
        """Start nothing from now on; running processes are left alone. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for future in (self.ready, self._wanted, self._starting):
            if future is not None:
                future.cancel()

    async def _keep(self) -> None:
        failures, since = 0, self._care.clock()
        while True:
            self._starting, self._wanted = self._wanted, None
            self._interrupt.clear()
            try:
                children = await self._care.start()
            except Exception as error:
                if not self.ready.done():
                    self.ready.set_exception(error)
                    return
                unexpected = not isinstance(error, PdkvError)
                logger.error("%s did not start again: %s", self.name, error, exc_info=unexpected)
                _settle(self._starting, error)
            else:
                began = self._care.clock()
                _settle(self.ready)
                _settle(self._starting)
                self._care.on_ready(self.name, began - since)
                died = await self._end_of(children)
                since = self._care.clock()
                if not died:
                    failures = 0
                    continue
                failures = 0 if self._care.clock() - began > _STABLE_S else failures
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s(failures)):  # wait_for may swallow a cancellation before 3.12
                    await self._interrupt.wait()
            failures += 1

    async def _end_of(self, children: Sequence[Child]) -> bool:
        """Wait until all have ended: True because one has died, False because a restart is requested."""
        child = await self._first_end(children)
        if child is None:
            await self._care.end(children)
            return False
        why = self._care.why(await child.wait())  # now: the next death is a new event
        await self._care.kill(children)
        logger.error("%s (pid %d) %s; restarting %s", child.name, child.pid, why, self.name)
        return True

    async def _first_end(self, children: Sequence[Child]) -> Child | None:
        """Wait until one of them has ended, and return it; None: a restart is requested."""
        waits: dict[asyncio.Future[object], Child | None] = {
            asyncio.ensure_future(child.wait()): child for child in children
        }
        waits[asyncio.ensure_future(self._interrupt.wait())] = None
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return next(child for wait, child in waits.items() if wait in done)


def _settle(future: asyncio.Future[None] | None, error: Exception | None = None) -> None:
    """Tell the waiter of a start, if there is one."""
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
        future.exception()  # retrieved: there may be no waiter any more
