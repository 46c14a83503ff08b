"""Keeps the router and the engines of one launch running: start, restart with backoff, stop within a bound."""

import asyncio
import dataclasses
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from pdkv.errors import PdkvError, StartupError
from pdkv.launch.children import AckPipe, Child, ForkServer, describe_exit, spawn_engine, spawn_router
from pdkv.launch.specs import EngineSpec, RouterSpec

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0
_STABLE_S = 60.0  # who lived this long starts again without a wait
_ROUTER_GRACE_S = 2.0  # with the engines' below the five seconds that a stop may take
_ENGINE_GRACE_S = 1.5

logger = logging.getLogger(__name__)


def backoff_s(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1: 0.1, 0.2, 0.4 … 30."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(failures, 16))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """What a supervisor keeps running."""

    engines: Sequence[EngineSpec]  # their epochs are drawn anew at each start
    router: RouterSpec
    connector_target: str  # "module:Class", which the fork server imports
    start_timeout_s: float
    use_fork_server: bool


class Supervisor:
    """Owns all child processes of a launch. Every method runs in one asyncio loop."""

    def __init__(self, fleet: Fleet, *, listen_fd: int, lifeline_fd: int, on_ready: Callable[[str], None]) -> None:
        """`lifeline_fd`: the reading end that children inherit; `on_ready(name)` is told of every (re)start."""
        self._fleet = fleet
        self._listen_fd = listen_fd
        self._lifeline_fd = lifeline_fd
        self._on_ready = on_ready
        self._children: set[Child] = set()
        self._router: Child | None = None
        self._forks: ForkServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start everything; returns when all are ready.

        Raises:
            ConfigError, StartupError: the first failure; the caller stops the rest.
        """
        if self._fleet.use_fork_server:
            self._forks = self._new_fork_server()  # its imports take longest: it goes first
        first_ready = [self._keep_running("router", self._start_router)]
        first_ready += [
            self._keep_running(spec.name, lambda spec=spec: self._start_engine(spec))  # type: ignore[misc]
            for spec in self._fleet.engines
        ]
        await asyncio.gather(*first_ready)

    def _keep_running(self, name: str, start: Callable[[], Awaitable[Child]]) -> asyncio.Future[None]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._keep(name, start, ready), name=name))
        return ready

    async def _keep(self, name: str, start: Callable[[], Awaitable[Child]], ready: asyncio.Future[None]) -> None:
        """Start a child again whenever it dies. Only a failure of the very first start is final."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            try:
                child = await start()
            except Exception as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                unexpected = not isinstance(error, PdkvError)
                logger.error("%s did not start again: %s", name, error, exc_info=unexpected)
            else:
                began = loop.time()
                if not ready.done():
                    ready.set_result(None)
                self._on_ready(name)
                status = await child.wait()
                self._children.discard(child)
                failures = 0 if loop.time() - began > _STABLE_S else failures
                logger.error("%s (pid %d) %s; it is started again", name, child.pid, describe_exit(status))
            await asyncio.sleep(backoff_s(failures))
            failures += 1

    async def _start_router(self) -> Child:
        spec = self._fleet.router
        if self._router is not None:  # a second one must not wait for an engine that cannot start
            spec = msgspec.structs.replace(spec, await_all=False)

        async def spawn(ack_fd: int) -> Child:
            self._router = spawn_router(spec, self._listen_fd, ack_fd, self._lifeline_fd)
            return self._router

        return await self._start_child("router", spawn)

    async def _start_engine(self, spec: EngineSpec) -> Child:
        spec = msgspec.structs.replace(spec, epoch=secrets.token_hex(8))
        return await self._start_child(spec.name, lambda ack_fd: self._make_engine(spec, ack_fd))

    async def _start_child(self, name: str, spawn: Callable[[int], Awaitable[Child]]) -> Child:
        """Spawn a child and wait for its ack. One that does not become ready is killed."""
        pipe = AckPipe()
        try:
            child = await spawn(pipe.write_fd)
            self._children.add(child)
            pipe.handed_over()
            try:
                await pipe.wait_ready(name, self._fleet.start_timeout_s, lambda text: logger.info("%s: %s", name, text))
            except Exception:
                child.send_signal(signal.SIGKILL)
                await child.wait()
                self._children.discard(child)
                raise
            return child
        finally:
            pipe.close()

    def _new_fork_server(self) -> ForkServer:
        return ForkServer(self._fleet.connector_target, self._lifeline_fd)

    async def _make_engine(self, spec: EngineSpec, ack_fd: int) -> Child:
        """Fork an engine, from a second fork server if the first is gone; spawn it if that fails too."""
        if not self._fleet.use_fork_server:
            return spawn_engine(spec, ack_fd, self._lifeline_fd)
        for _ in range(2):
            if self._forks is None or not self._forks.usable:
                self._forks = self._new_fork_server()
            try:
                return await self._forks.fork_engine(spec, ack_fd)
            except StartupError as error:
                logger.warning("%s: %s", spec.name, error)
        logger.warning("%s is started without the fork server", spec.name)
        return spawn_engine(spec, ack_fd, self._lifeline_fd)

    async def stop(self) -> None:
        """End all children: first the router, then the engines; who does not go in time is killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        router = {self._router} if self._router is not None else set()
        await _end(router, _ROUTER_GRACE_S)
        rest = self._children - router
        if self._forks is not None:
            self._forks.close()
            rest.add(self._forks.child)
        await _end(rest, _ENGINE_GRACE_S)

    def kill(self) -> None:
        """Kill all children at once, for whoever does not want to wait for `stop`."""
        for child in self._children:
            child.send_signal(signal.SIGKILL)


async def _end(children: Collection[Child], grace_s: float) -> None:
    """SIGTERM, then SIGKILL after `grace_s`; returns when all are gone."""
    waits = [asyncio.ensure_future(child.wait()) for child in children if child.alive]
    if not waits:
        return
    for child in children:
        child.send_signal(signal.SIGTERM)
    _, late = await asyncio.wait(waits, timeout=grace_s)
    if late:
        for child in children:
            if child.alive:
                logger.warning("%s (pid %d) did not stop within %g s and is killed", child.name, child.pid, grace_s)
                child.send_signal(signal.SIGKILL)
        await asyncio.wait(late)
