"""Starts and ends engines of a launch as its router's autoscaler decides (docs/autoscaling.md)."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.base.limits import clip
from pdkv.errors import PdkvError
from pdkv.launch.fleet_control import FleetControl
from pdkv.launch.plan import ROLES, Kind
from pdkv.router.scaling.autoscaler import Told
from pdkv.router.scaling.scaler import Orders

RETRY_S = 1.0
"""Seconds until a router that did not answer is asked again."""

logger = logging.getLogger(__name__)


class LaunchScaler:
    """Asks the router for orders, one time after the other, and carries out each in a task of its own."""

    def __init__(self, fleet: FleetControl, drain_s: float, clock: Clock = MONOTONIC) -> None:
        """`drain_s`: how long requests of a leaving engine may continue there; then they are moved."""
        self._fleet, self._drain_s, self._clock = fleet, drain_s, clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._starting: dict[str, str] = {}  # roles by name
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._ending: set[str] = set()  # those of them that nothing keeps any more
        self._num_started = self._num_failed = 0
        self._failure, self._start_s = "", 0.0

    @property
    def is_busy(self) -> bool:
        """Whether engines are being started or ended."""
        return bool(self._starting or self._leaving)

    @contextlib.asynccontextmanager
    async def running(self, waits: Callable[[], bool]) -> AsyncIterator[None]:
        """Scale until the end of the block, which ends what is under way. `waits`: whether others change engines."""
        self._begin(self._run(waits))
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, waits: Callable[[], bool]) -> None:
        while True:
            pause_s = RETRY_S
            if not waits():
                try:
                    orders = await self._fleet.router.autoscale(self._told())
                    if not waits():
                        pause_s = await self._carry_out(orders)
                except Exception as error:
                    logger.error("autoscaler: %s", error, exc_info=not isinstance(error, PdkvError))
            await self._clock.pause(pause_s)

    def _told(self) -> Told:
        return Told(
            dict(self._starting), list(self._leaving), self._num_started, self._num_failed, self._failure, self._start_s
        )

    async def _carry_out(self, orders: Orders) -> float:
        """Begin what is to be done; returns the seconds until the next review."""
        for name in orders.keep:
            await self._keep(name)
        for name in orders.stop:
            if name in self._fleet.supervisor.engines and name not in self._leaving:
                self._leaving[name] = self._begin(self._leave(name))
        kinds: dict[str, Kind] = {role: kind for kind, role in ROLES.items()}
        for role, count in orders.start.items():
            for _ in range(count):
                self._begin(self._start(kinds[role]))
        await asyncio.sleep(0)  # each has its name
        return orders.pause_s

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("autoscaler: a defect", exc_info=error)

    async def _start(self, kind: Kind) -> None:
        began, say = self._clock.now(), functools.partial(logger.info, "autoscaler: %s")
        name = ""
        try:
            [spec] = self._fleet.plan({kind: 1})
            name = spec.name
            self._starting[name] = spec.role
            await self._fleet.add(spec, say)
        except Exception as error:
            self._num_failed += 1
            self._failure = clip(f"{name or kind}: {error}")
            logger.error("autoscaler: no engine more: %s", self._failure, exc_info=not isinstance(error, PdkvError))
        else:
            self._num_started += 1
            self._start_s = self._clock.now() - began
        finally:
            self._starting.pop(name, None)

    async def _leave(self, name: str) -> None:
        say = functools.partial(logger.info, "autoscaler: %s")
        try:
            await self._fleet.drain(name, self._drain_s, say)
            self._ending.add(name)
            await self._fleet.end(name)
            say(f"{name} has ended")
        except PdkvError as error:
            logger.error("autoscaler: %s: %s", name, error)
        finally:
            self._ending.discard(name)
            self._leaving.pop(name, None)

    async def _keep(self, name: str) -> None:
        """Let an engine go on that is being drained, unless it is about to end."""
        task = self._leaving.get(name)
        if task is None or name in self._ending:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        logger.info("autoscaler: %s is kept", name)
        await self._fleet.router.resume(name)
