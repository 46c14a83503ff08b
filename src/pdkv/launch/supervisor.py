"""Keeps the router and the engines of one launch running: start, restart with backoff, stop within a limit."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.errors import ConfigError, DiedEarly, IncompatiblePeers, OtherRankGone, StartupError
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
from pdkv.launch.keeper import Care, Keeper
from pdkv.launch.listening import listen_for_fronts
from pdkv.launch.run_dir import FRONTS_SOCKET
from pdkv.launch.specs import EngineSpec
from pdkv.router.engines.address import EngineAddress
from pdkv.router.spec import RouterSpec
from pdkv.wire.refusal_note import RefusalNote

_ROUTER = "router"
FRONT = "front-"
"""How the names of fronts begin."""
_ROUTER_GRACE_S = 2.0  # with the engines' below the five seconds that a stop may take
_ENGINE_GRACE_S = 1.5
_OTHER_RANKS_S = 5.0  # between the failure of a rank and that of another one, which caused it
_LAST_WORD_S = 1.0  # between the end of a child's acknowledgements and its own end

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """The initial processes of a supervisor."""

    engines: Sequence[EngineSpec]  # their epochs are drawn again at each start
    router: RouterSpec | None  # None: it runs on another host
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
        clock: Callable[[], float] = MONOTONIC.now,
    ) -> None:
        """`lifeline_fd`: the read end that children inherit.

        `on_ready(name, seconds)` is called for every start with its duration: from the beginning of the first start, or
        from the end of the previous process.
        """
        self._fleet = fleet
        self._listen_fd = listen_fd
        self._lifeline_fd = lifeline_fd
        self._on_ready = on_ready
        self._clock = clock
        self._children: set[Child] = set()
        self._routers: dict[str, Child] = {}  # the router, or the dispatcher and its fronts, by name
        self._fronts_listener: socket.socket | None = None  # for the dispatcher and its successors
        self._listen_for_hangups: set[Child] = set()  # they handle it: before they are ready, a SIGHUP would end them
        self._forks: ForkServer | None = None
        self._keepers: dict[str, Keeper] = {}
        self.engines = {spec.name: spec for spec in fleet.engines}  # kept running, by name, oldest first
        self._addresses = {a.name: a for a in fleet.router.engines} if fleet.router is not None else {}
        self._hurried = asyncio.Event()
        self._oom_kills = OomWatch()
        self._model = self._first_loaded = ""  # its identity, and who reported it first; empty: nobody has yet

    async def start(self) -> None:
        """Start everything; returns when all are ready.

        Raises:
            ConfigError, StartupError: the first failure; the caller stops the rest.
        """
        if self._fleet.use_fork_server:
            self._forks = self._new_fork_server()  # its imports take longest, so it starts first
        first_ready = [self._keep_engine(name).ready for name in self.engines]
        if (router := self._fleet.router) is not None:
            if router.num_fronts:
                assert router.run_dir is not None
                self._fronts_listener = listen_for_fronts(router.run_dir / FRONTS_SOCKET)
            for name in (_ROUTER, *(f"{FRONT}{index}" for index in range(router.num_fronts))):
                first_ready.append(self._keep_running(name, functools.partial(self._start_router, name, router)).ready)
        await asyncio.gather(*first_ready)

    def pid_of(self, name: str) -> int | None:
        """Process id of an engine's first rank; None if none is running."""
        return next((child.pid for child in self._children if child.name == name and child.alive), None)

    async def add_engine(self, spec: EngineSpec, address: EngineAddress) -> None:
        """Start one more engine; returns when it is ready. Routers that start later are told of the engine, but not
        running ones, which would never learn that it failed to start.

        Raises:
            PdkvError: the engine did not become ready; nothing of it is left.
        """
        assert spec.name not in self.engines, f"two engines are named {spec.name}"
        self.engines[spec.name] = spec
        try:
            await asyncio.shield(self._keep_engine(spec.name).ready)
        except BaseException:
            await self.remove_engine(spec.name)
            raise
        self._addresses[spec.name] = address

    async def restart_engine(self, spec: EngineSpec) -> None:
        """Stop an engine and start it again with this spec; returns when it is ready.

        Raises:
            PdkvError: the engine did not start; it is still retried.
        """
        self.engines[spec.name] = spec
        await self._keepers[spec.name].restart()

    def hide_engine(self, name: str) -> None:
        """Do not tell routers that start from now on of an engine that is about to be removed."""
        self._leave_note(name, None)
        self._addresses.pop(name, None)

    async def remove_engine(self, name: str) -> None:
        """Stop an engine for good."""
        await self._keepers.pop(name).cancel()
        del self.engines[name]
        self.hide_engine(name)
        own = [child for child in self._children if child.name.partition(".")[0] == name]
        await self._end_engines(own)

    def renew_fork_server(self) -> None:
        """Pass this process's current environment to engines that start from now on."""
        if self._forks is not None:
            self._forks.close()

    def _keep_engine(self, name: str) -> Keeper:
        return self._keep_running(name, lambda: self._admit_engine(self.engines[name]))

    def _keep_running(self, name: str, start: Callable[[], Awaitable[list[Child]]]) -> Keeper:
        care = Care(start, self._end_engines, self._kill, self._why, self._on_ready, self._clock)
        self._keepers[name] = Keeper(name, care)
        return self._keepers[name]

    async def _end_engines(self, children: Collection[Child]) -> None:
        """End engines or ranks in order, or after their grace period."""
        await _end(children, _ENGINE_GRACE_S)
        self._children.difference_update(children)

    async def _start_router(self, name: str, spec: RouterSpec) -> list[Child]:
        """Start the router, or the dispatcher or one of its fronts."""
        listener = self._fronts_listener if name == _ROUTER else None
        listen_fd = self._listen_fd if listener is None else listener.fileno()
        spec = msgspec.structs.replace(spec, engines=list(self._addresses.values()))
        if name in self._routers:  # a second one must not wait for an engine that cannot start
            spec = msgspec.structs.replace(spec, await_all=False, identity=self._model)

        async def spawn(ack: AckSocket) -> Child:
            self._routers[name] = spawn_router(name, spec, listen_fd, ack.child_fd, self._lifeline_fd)
            return self._routers[name]

        router = await self._start_child(name, spawn)
        self._reloads(router)
        return [router]

    def _reloads(self, child: Child) -> None:
        self._listen_for_hangups.add(child)
        child.when_dead(lambda _: self._listen_for_hangups.discard(child))

    def reload_files(self) -> None:
        """Have the router read its API keys and its certificate again; a router that is starting reads them anyway."""
        for child in self._listen_for_hangups:
            child.send_signal(signal.SIGHUP)

    async def _admit_engine(self, spec: EngineSpec) -> list[Child]:
        """Start an engine; routers are told of one that is refused."""
        reason: str | None = None
        try:
            return await self._start_engine(spec)
        except IncompatiblePeers as error:
            reason = str(error)
            raise
        finally:
            self._leave_note(spec.name, reason)

    def _leave_note(self, name: str, reason: str | None) -> None:
        """Write why the engine is refused; None: it is not. If it cannot be written, it is only in the log."""
        address = self._addresses.get(name)
        if address is None or address.refusal is None:
            return
        note = RefusalNote(address.refusal)
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
            links.close()  # a rank that is being forked finds no launcher
            if isinstance(error, OtherRankGone):
                error = await _own_failure(starts) or error
            await self._kill(ranks)
            failures = await asyncio.gather(*starts, return_exceptions=True)
            await self._kill(ranks)
            raise next((e for e in failures if isinstance(e, ConfigError)), error) from None
        finally:
            for start in starts:
                start.cancel()  # a rank is only unfinished if this task itself is cancelled
            links.close()

    async def _kill(self, children: Collection[Child]) -> None:
        """Kill children at once, including those that have ended; returns when they are gone."""
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

        on_identity = functools.partial(self._check_model, name)
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

    def _check_model(self, name: str, identity: str) -> None:
        """An engine, or a rank of one, has loaded this. The first identity is the deployment's as long as this lives.

        A restarted engine that reads other weights is refused, even if all others are gone: answers that have begun,
        and KV that is kept elsewhere, are of the first.

        Raises:
            IncompatiblePeers: others have loaded something else; the message has both values.
        """
        if not self._model:
            self._model, self._first_loaded = identity, name
        if identity != self._model:
            raise IncompatiblePeers(
                f"{name} has model {identity}, but the deployment started with model {self._model} (of "
                f"{self._first_loaded}): weight files or config.json differ. Restore them, or restart the deployment"
            )

    async def _end_of(self, child: Child) -> str:
        """How a child ended that has closed its acknowledgements. One that is still running is killed."""
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                return self._why(await child.wait())
        except TimeoutError:
            return "it closed its socket but kept running"
        finally:
            await self._kill([child])

    def _why(self, status: int) -> str:
        """How a child ended without being told to."""
        return describe_exit(status, out_of_memory=self._oom_kills.explains(status))

    def _new_fork_server(self) -> ForkServer:
        return ForkServer(self._fleet.connector_target, self._lifeline_fd)

    async def _make_engine(self, spec: EngineSpec, ack: AckSocket, rank_fds: Sequence[int]) -> Child:
        """Fork a rank of an engine, from a second fork server if the first is gone; spawn it if that fails, too."""
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
                ack.start_over()  # it may have forked but not answered
        logger.warning("%s is started without the fork server", spec.process_name)
        return spawn_engine(spec, ack.child_fd, self._lifeline_fd, rank_fds)

    async def stop(self, drain_s: float = 0.0, stuck: Callable[[], Awaitable[None]] | None = None) -> None:
        """End all children: first the router, then the engines; those that do not end in time are killed.

        The router may take `drain_s` to answer running requests; engines that die in this time are restarted. `stuck()`
        returns when the router turns out to be unable to answer them.
        """
        for name in [name for name in self._keepers if name == _ROUTER or name.startswith(FRONT)]:
            await self._keepers.pop(name).cancel()
        routers = [router for router in self._routers.values() if router.alive]
        if drain_s and routers:
            await self._drain_router(routers, drain_s, stuck)
        await _end(routers, _ROUTER_GRACE_S)
        if self._fronts_listener is not None:
            self._fronts_listener.close()
        await asyncio.gather(*(keeper.cancel() for keeper in self._keepers.values()))
        rest = self._children - set(routers)
        if self._forks is not None:
            self._forks.close()
            rest.add(self._forks.child)
        await _end(rest, _ENGINE_GRACE_S)

    def hurry(self) -> None:
        """Stop waiting for running requests. Idempotent."""
        self._hurried.set()

    async def _drain_router(
        self, processes: Sequence[Child], drain_s: float, stuck: Callable[[], Awaitable[None]] | None
    ) -> None:
        """Wait until the router and its fronts have ended, have had their time, or a stop in a hurry is requested."""
        for process in processes:
            process.send_signal(signal.SIGTERM)
        waits: list[asyncio.Future[Any]] = [asyncio.gather(*(process.wait() for process in processes))]
        waits.append(asyncio.ensure_future(self._hurried.wait()))
        if stuck is not None:
            waits.append(asyncio.ensure_future(stuck()))
        await asyncio.wait(waits, timeout=drain_s + _ROUTER_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    def kill(self) -> None:
        """Kill all children at once, instead of waiting for `stop`."""
        for child in self._children:
            child.send_signal(signal.SIGKILL)


async def _own_failure(starts: Sequence["asyncio.Future[Child]"]) -> Exception | None:
    """The failure of the rank that failed first among starting ranks, as far as they report it soon."""
    pending = set(starts)
    deadline = MONOTONIC.now() + _OTHER_RANKS_S
    while pending:
        timeout_s = max(deadline - MONOTONIC.now(), 0.0)
        done, pending = await asyncio.wait(pending, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for start in done:
            failure = start.exception()
            if isinstance(failure, Exception) and not isinstance(failure, OtherRankGone):
                return failure
        if not done:
            break
    return None


def _fresh_store(path: Path, epoch: str) -> Path:
    """Where the ranks of one incarnation meet; files of earlier ones are deleted."""
    for old in path.parent.glob(f"{path.name}-*"):
        old.unlink(missing_ok=True)
    return path.with_name(f"{path.name}-{epoch}")


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
