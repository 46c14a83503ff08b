"""Keeps the router and the engines of one launch running: start, restart with backoff, stop within a bound."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path

import msgspec

from pdkv.errors import ConfigError, DiedEarly, IncompatiblePeers, PdkvError, StartupError
from pdkv.launch.children import (
    AckSocket,
    Child,
    ForkServer,
    OomWatch,
    RankLinks,
    describe_exit,
    spawn_engine,
    spawn_router,
)
from pdkv.launch.deployment_model import DeploymentModel
from pdkv.launch.specs import EngineSpec, RouterSpec
from pdkv.wire.refusal_note import RefusalNote

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 30.0
_STABLE_S = 60.0  # who lived this long starts again without a wait
_ROUTER_GRACE_S = 2.0  # with the engines' below the five seconds that a stop may take
_ENGINE_GRACE_S = 1.5
_LAST_WORD_S = 1.0  # between the end of a child's acknowledgements and its own

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

    def __init__(
        self,
        fleet: Fleet,
        *,
        listen_fd: int,
        lifeline_fd: int,
        on_ready: Callable[[str, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lifeline_fd`: the reading end that children inherit.

        `on_ready(name, seconds)` is told of every start, and of what it took: from the beginning of the first start, or
        from the end of what ran before.
        """
        self._fleet = fleet
        self._listen_fd = listen_fd
        self._lifeline_fd = lifeline_fd
        self._on_ready = on_ready
        self._clock = clock
        self._children: set[Child] = set()
        self._router: Child | None = None
        self._forks: ForkServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._oom_kills = OomWatch()
        self._model = DeploymentModel()
        self._notes = {a.name: RefusalNote(a.refusal) for a in fleet.router.engines if a.refusal is not None}

    async def start(self) -> None:
        """Start everything; returns when all are ready.

        Raises:
            ConfigError, StartupError: the first failure; the caller stops the rest.
        """
        if self._fleet.use_fork_server:
            self._forks = self._new_fork_server()  # its imports take longest: it goes first
        first_ready = [self._keep_running("router", self._start_router)]
        first_ready += [
            self._keep_running(spec.name, lambda spec=spec: self._admit_engine(spec))  # type: ignore[misc]
            for spec in self._fleet.engines
        ]
        await asyncio.gather(*first_ready)

    def _keep_running(self, name: str, start: Callable[[], Awaitable[list[Child]]]) -> asyncio.Future[None]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks.append(asyncio.create_task(self._keep(name, start, ready), name=name))
        return ready

    async def _keep(self, name: str, start: Callable[[], Awaitable[list[Child]]], ready: asyncio.Future[None]) -> None:
        """Start a router or all ranks of an engine again whenever one of them dies, which ends the others.

        Only a failure of the very first start is final.
        """
        failures = 0
        since = self._clock()
        while True:
            try:
                children = await start()
            except Exception as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                unexpected = not isinstance(error, PdkvError)
                logger.error("%s did not start again: %s", name, error, exc_info=unexpected)
            else:
                began = self._clock()
                if not ready.done():
                    ready.set_result(None)
                self._on_ready(name, began - since)
                child = await _first_death(children)
                status = await child.wait()
                since = self._clock()
                why = self._why(status)  # now: the next death is another story
                await self._kill(children)
                failures = 0 if self._clock() - began > _STABLE_S else failures
                logger.error("%s (pid %d) %s; %s is started again", child.name, child.pid, why, name)
            await asyncio.sleep(backoff_s(failures))
            failures += 1

    async def _start_router(self) -> list[Child]:
        spec = self._fleet.router
        if self._router is not None:  # a second one must not wait for an engine that cannot start
            spec = msgspec.structs.replace(spec, await_all=False, identity=self._model.identity)

        async def spawn(ack: AckSocket) -> Child:
            self._router = spawn_router(spec, self._listen_fd, ack.child_fd, self._lifeline_fd)
            return self._router

        return [await self._start_child("router", spawn)]

    async def _admit_engine(self, spec: EngineSpec) -> list[Child]:
        """Start an engine; routers hear of one that is refused."""
        reason: str | None = None
        try:
            return await self._start_engine(spec)
        except IncompatiblePeers as error:
            reason = str(error)
            raise
        finally:
            self._leave_note(spec.name, reason)

    def _leave_note(self, name: str, reason: str | None) -> None:
        """Why the engine is refused; None: it is not. What cannot be written is in the log alone."""
        note = self._notes.get(name)
        if note is None:
            return
        with contextlib.suppress(OSError):
            if reason is None:
                note.clear()
            else:
                note.write(reason)

    async def _start_engine(self, spec: EngineSpec) -> list[Child]:
        """Start all ranks of an engine; returns when each is ready. If one fails, none is left."""
        epoch = secrets.token_hex(8)
        store = _fresh_store(spec.store, epoch) if spec.store is not None else None
        links = RankLinks(spec.config.tp)
        ranks: list[Child] = []

        async def start_rank(rank: int) -> Child:
            own = msgspec.structs.replace(spec, epoch=epoch, store=store, rank=rank)

            async def spawn(ack: AckSocket) -> Child:
                ranks.append(await self._make_engine(own, ack, links.fds(rank)))
                links.handed_over(rank)
                return ranks[-1]

            return await self._start_child(own.process_name, spawn)

        starts = [asyncio.ensure_future(start_rank(rank)) for rank in range(spec.config.tp)]
        try:
            return await asyncio.gather(*starts)
        except Exception as error:
            links.close()  # a rank that is being forked finds nobody
            await self._kill(ranks)
            failures = await asyncio.gather(*starts, return_exceptions=True)
            await self._kill(ranks)
            raise next((e for e in failures if isinstance(e, ConfigError)), error) from None
        finally:
            links.close()

    async def _kill(self, children: Collection[Child]) -> None:
        """End children at once, also those that have ended; returns when they have."""
        for child in children:
            child.send_signal(signal.SIGKILL)
        for child in children:
            await child.wait()
        self._children.difference_update(children)

    async def _start_child(self, name: str, spawn: Callable[[AckSocket], Awaitable[Child]]) -> Child:
        """Spawn a child and wait for its ack. One that does not become ready is killed."""
        ack = AckSocket()

        def on_progress(text: str) -> None:
            logger.info("%s: %s", name, text)

        def on_identity(model: str) -> None:
            self._model.check(name, model)

        try:
            child = await spawn(ack)
            self._children.add(child)
            ack.handed_over()
            try:
                await ack.wait_ready(name, self._fleet.start_timeout_s, on_progress, on_identity)
            except DiedEarly as error:
                raise StartupError(f"{error}: {await self._end_of(child)}") from None
            except Exception:
                await self._kill([child])
                raise
            return child
        finally:
            ack.close()

    async def _end_of(self, child: Child) -> str:
        """How a child ended that has closed its acknowledgements. One that only did that is killed."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                return self._why(await child.wait())
        except TimeoutError:
            return "it closed its socket but kept running"
        finally:
            await self._kill([child])

    def _why(self, status: int) -> str:
        """How a child ended that nobody told to."""
        return describe_exit(status, out_of_memory=self._oom_kills.explains(status))

    def _new_fork_server(self) -> ForkServer:
        return ForkServer(self._fleet.connector_target, self._lifeline_fd)

    async def _make_engine(self, spec: EngineSpec, ack: AckSocket, rank_fds: Sequence[int]) -> Child:
        """Fork a rank of an engine, from a second fork server if the first is gone; spawn it if that fails too."""
        if not self._fleet.use_fork_server:
            return spawn_engine(spec, ack.child_fd, self._lifeline_fd, rank_fds)
        for _ in range(2):
            if self._forks is None or not self._forks.usable:
                self._forks = self._new_fork_server()
            try:
                timeout_s = self._fleet.start_timeout_s
                return await self._forks.fork_engine(spec, ack.child_fd, rank_fds, timeout_s=timeout_s)
            except StartupError as error:
                logger.warning("%s: %s", spec.process_name, error)
                ack.start_over()  # it may have forked and owe the answer
        logger.warning("%s is started without the fork server", spec.process_name)
        return spawn_engine(spec, ack.child_fd, self._lifeline_fd, rank_fds)

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


def _fresh_store(path: Path, epoch: str) -> Path:
    """Where the ranks of one incarnation meet; what those before left is deleted."""
    for old in path.parent.glob(f"{path.name}-*"):
        old.unlink(missing_ok=True)
    return path.with_name(f"{path.name}-{epoch}")


async def _first_death(children: Sequence[Child]) -> Child:
    """Waits until one of them has ended, and returns it."""
    waits = {asyncio.ensure_future(child.wait()): child for child in children}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return next(child for wait, child in waits.items() if wait in done)


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
