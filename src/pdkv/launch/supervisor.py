"""Keeps the router and the engines of one launch running: start, restart with backoff, stop within a limit."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.errors import IncompatiblePeers
from pdkv.launch.children import AckSocket, Child, spawn_router
from pdkv.launch.keeper import Care, Keeper
from pdkv.launch.listening import listen_for_fronts
from pdkv.launch.run_dir import FRONTS_SOCKET
from pdkv.launch.specs import EngineSpec
from pdkv.launch.starter import Children, EngineStarter, LocalStarter
from pdkv.router.engines.address import EngineAddress
from pdkv.router.spec import RouterSpec
from pdkv.wire.refusal_note import RefusalNote

_ROUTER = "router"
FRONT = "front-"
"""How the names of fronts begin."""
_ROUTER_GRACE_S = 2.0  # with the engines' below the five seconds that a stop may take

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
        make_starter: Callable[[Children], EngineStarter] | None = None,
    ) -> None:
        """`lifeline_fd`: the read end that children inherit.

        `on_ready(name, seconds)` is called for every start with its duration: from the beginning of the first start, or
        from the end of the previous process. `make_starter`: what starts the engines elsewhere; None: they start here.
        """
        self._fleet = fleet
        self._listen_fd = listen_fd
        self._lifeline_fd = lifeline_fd
        self._on_ready = on_ready
        self._clock = clock
        self._children = Children(fleet.start_timeout_s, functools.partial(logger.info, "%s: %s"), self._check_model)
        self._make_starter = make_starter or self._start_locally
        self._starter: EngineStarter | None = None  # until everything starts
        self.on_moved: Callable[[EngineAddress], Awaitable[None]] | None = None
        """Tells the running router that an engine has been started again at another address."""
        self._routers: dict[str, Child] = {}  # the router, or the dispatcher and its fronts, by name
        self._fronts_listener: socket.socket | None = None  # for the dispatcher and its successors
        self._listen_for_hangups: set[Child] = set()  # they handle it: before they are ready, a SIGHUP would end them
        self._keepers: dict[str, Keeper] = {}
        self.engines = {spec.name: spec for spec in fleet.engines}  # kept running, by name, oldest first
        self._addresses = {a.name: a for a in fleet.router.engines} if fleet.router is not None else {}
        self.hurried = asyncio.Event()  # running requests are not waited for any longer
        self._model = self._first_loaded = ""  # its identity, and who reported it first; empty: nobody has yet

    async def start(self) -> None:
        """Start everything; returns when all are ready.

        Raises:
            ConfigError, StartupError: the first failure; the caller stops the rest.
        """
        self._starter = self._make_starter(self._children)
        first_ready = [self._keep_engine(name).ready for name in self.engines]
        if any(not spec.endpoint for spec in self.engines.values()):
            await asyncio.gather(*first_ready)  # a router must know where they are
        if (router := self._fleet.router) is not None:
            if router.num_fronts:
                assert router.run_dir is not None
                self._fronts_listener = listen_for_fronts(router.run_dir / FRONTS_SOCKET)
            for name in (_ROUTER, *(f"{FRONT}{index}" for index in range(router.num_fronts))):
                first_ready.append(self._keep_running(name, functools.partial(self._start_router, name, router)).ready)
        await asyncio.gather(*first_ready)

    def pid_of(self, name: str) -> int | None:
        """Process id of an engine's first rank; None if none is running."""
        return next((child.pid for child in self._children.running if child.name == name and child.alive), None)

    async def add_engine(self, spec: EngineSpec, address: EngineAddress) -> EngineAddress:
        """Start one more engine; returns its address when it is ready. Routers that start later are told of the engine,
        but not running ones, which would never learn that it failed to start.

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
        own = (child.endpoint for child in self._children.running if child.name == spec.name and child.alive)
        self._addresses[spec.name] = _at(address, next(own, ""))
        return self._addresses[spec.name]

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
        own = [child for child in self._children.running if child.name.partition(".")[0] == name]
        await self._children.end(own)
        await self._own_starter.forget(name)

    def renew_environment(self) -> None:
        """Pass this process's current environment to engines that start from now on."""
        if self._starter is not None:
            self._starter.renew()

    @property
    def _own_starter(self) -> EngineStarter:
        assert self._starter is not None, "not started"
        return self._starter

    def _start_locally(self, children: Children) -> EngineStarter:
        fleet = self._fleet
        return LocalStarter(children, self._lifeline_fd, fleet.connector_target, use_fork_server=fleet.use_fork_server)

    def _keep_engine(self, name: str) -> Keeper:
        return self._keep_running(name, lambda: self._admit_engine(self.engines[name]))

    def _keep_running(self, name: str, start: Callable[[], Awaitable[list[Child]]]) -> Keeper:
        children = self._children
        care = Care(start, children.end, children.kill, children.why, self._on_ready, self._clock)
        self._keepers[name] = Keeper(name, care)
        return self._keepers[name]

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

        router = await self._children.start(name, spawn)
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
            children = await self._own_starter.start(spec)
            await self._note_address(spec.name, children)
            return children
        except IncompatiblePeers as error:
            reason = str(error)
            raise
        finally:
            self._leave_note(spec.name, reason)

    async def _note_address(self, name: str, children: Sequence[Child]) -> None:
        """Keep where an engine listens, and tell the running router if it has moved. Raises PdkvError, and ends it."""
        before = self._addresses.get(name)
        if before is None or before == (now := _at(before, children[0].endpoint)):
            return
        self._addresses[name] = now
        try:
            if before.endpoint and self.on_moved is not None:
                await self.on_moved(now)
        except BaseException:
            self._addresses[name] = before  # the next start tells the router again
            await self._children.kill(children)
            raise

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
        await self._children.end(routers, _ROUTER_GRACE_S)
        if self._fronts_listener is not None:
            self._fronts_listener.close()
        await asyncio.gather(*(keeper.cancel() for keeper in self._keepers.values()))
        await self._children.end(list(self._children.running))
        if self._starter is not None:
            await self._starter.close()

    async def _drain_router(
        self, processes: Sequence[Child], drain_s: float, stuck: Callable[[], Awaitable[None]] | None
    ) -> None:
        """Wait until the router and its fronts have ended, have had their time, or a stop in a hurry is requested."""
        for process in processes:
            process.send_signal(signal.SIGTERM)
        waits: list[asyncio.Future[Any]] = [asyncio.gather(*(process.wait() for process in processes))]
        waits.append(asyncio.ensure_future(self.hurried.wait()))
        if stuck is not None:
            waits.append(asyncio.ensure_future(stuck()))
        await asyncio.wait(waits, timeout=drain_s + _ROUTER_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    def kill(self) -> None:
        """Kill all children at once, instead of waiting for `stop`."""
        for child in self._children.running:
            child.send_signal(signal.SIGKILL)


def _at(address: EngineAddress, endpoint: str) -> EngineAddress:
    """The address with this endpoint, if there is one."""
    return msgspec.structs.replace(address, endpoint=endpoint) if endpoint else address
