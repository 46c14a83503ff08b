"""A deployment under chaos: its processes by name, and how each kind of event is done to it."""

import asyncio
import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from deployments import Running
from faults.sockets import cut, is_of_transfers, is_to_router
from store_servers import RedisServer, StoreServer

from pdkv.connector_kit.rig.sockets import listeners, send_garbage
from soak.backends import STORE_MIB
from soak.bad_clients import be_rude
from soak.journal import Journal
from soak.load import Load
from soak.operations import Operator
from soak.private_mounts import SHM, fill
from soak.schedule import OPERATIONS, Event, Site

BURST = 24
_SMALL_FILE_BYTES = 4096
_NAME_BYTES = 15  # of a process, to the kernel
_CUT_EVERY_S = 0.05
_NO_MORE_FILES = 3  # descriptors that a process may have: as it has more, it gets none


@dataclass
class World:
    """What events are done to."""

    deployment: Running
    site: Site
    server: StoreServer | None
    files: Path | None  # where engines keep values
    private: bool  # /dev/shm and `files` are small file systems of this run's own
    load: Load
    journal: Journal
    seed: str
    operator: Operator
    server_restart: asyncio.Lock = field(default_factory=asyncio.Lock)
    launcher_stop: asyncio.Lock = field(default_factory=asyncio.Lock)

    def processes(self) -> Iterator[psutil.Process]:
        """The launcher and all below it."""
        launcher = psutil.Process(self.deployment.process.pid)
        yield launcher
        yield from launcher.children(recursive=True)

    def process(self, name: str) -> psutil.Process | None:
        """By the name of an engine, another rank, "router" or "fork-server"; None: it is starting again."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if process.name() == f"pd {name}"[:_NAME_BYTES] and process.status() != psutil.STATUS_ZOMBIE:
                    return process
        return None

    def names_of(self, role: str) -> list[str]:
        """Of the engines that a role has at first, and of those that were added to it."""
        names = (process.name().removeprefix("pd ") for process in self.processes())
        return [name for name in names if name.startswith(f"{role}-") and "." not in name]

    async def happen(self, event: Event) -> None:
        """Do it; returns when it is over."""
        self.journal.note(f"begins: {event}")
        try:
            if event.kind in OPERATIONS:
                happened = await self.operator.do(event)
            else:
                happened = await HANDLERS[event.kind.split()[0]](self, event)
        except (psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):  # it died meanwhile
            happened = False
        if happened:
            self.journal.events[event.kind] += 1
        self.journal.note(f"ends: {event}" if happened else f"nobody there: {event}")


async def _kill(world: World, event: Event) -> bool:
    if event.kind == "kill server":
        assert world.server is not None
        async with world.server_restart:  # a second kill would hit the process that the first one waits for
            await asyncio.to_thread(world.server.restart)
        return True
    process = world.process(event.target)
    if process is None:
        return False
    if event.target == "router":
        world.journal.router_deaths.append(time.monotonic())
    world.journal.killed.add(process.pid)
    process.kill()
    return True


async def _stop(world: World, event: Event) -> bool:
    """SIGSTOP, and SIGCONT when the time is over."""
    if event.kind.startswith("stop server"):
        assert world.server is not None
        process: psutil.Process | None = psutil.Process(world.server.process.pid)
    else:
        process = world.process(event.target)
    if process is None:
        return False
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(event.seconds)
    with contextlib.suppress(psutil.NoSuchProcess):  # killed meanwhile
        process.send_signal(signal.SIGCONT)
    return True


async def _gone(world: World, event: Event) -> bool:
    """No engine of a role for a while: all are killed while the launcher, which would start them again, is stopped."""
    launcher = psutil.Process(world.deployment.process.pid)
    async with world.launcher_stop:
        launcher.send_signal(signal.SIGSTOP)
        try:
            victims = [p for name in world.names_of(event.target) if (p := world.process(name)) is not None]
            for process in victims:
                world.journal.killed.add(process.pid)
                process.kill()
            await asyncio.sleep(event.seconds)
        finally:
            launcher.send_signal(signal.SIGCONT)
    return bool(victims)


async def _cut(world: World, event: Event) -> bool:
    """An engine's connections, with the router or with everybody else."""
    process = world.process(event.target)
    if process is None:
        return False
    return cut(process.pid, event.target, is_to_router if event.kind == "cut engine" else is_of_transfers) > 0


async def _serves(world: World, target: str) -> bool:
    """Whether an engine, or that of a rank, is ready as far as the router knows."""
    try:
        engines = (await asyncio.to_thread(world.deployment.get, "/topology")).json()["engines"]
    except httpx.TransportError:
        return False
    return any(e["name"] == target.partition(".")[0] and e["state"] == "ready" for e in engines)


async def _refuse(world: World, event: Event) -> bool:
    """An engine can open nothing: no connection, no peer's memory, no file; and loses what connections it has."""
    process = world.process(event.target)
    if process is None or not await _serves(world, event.target):  # one that is still starting is left alone
        return False
    world.journal.killed.add(process.pid)  # libzmq aborts where it has no descriptor for who connects to ipc://
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (_NO_MORE_FILES, before[1]))
    try:
        async with asyncio.timeout(event.seconds):
            while True:
                if world.site.has_links:
                    cut(process.pid, event.target, is_of_transfers)
                await asyncio.sleep(_CUT_EVERY_S)
    except TimeoutError:
        return True
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_NOFILE, before)


async def _rude(world: World, event: Event) -> bool:
    return await be_rude(world.deployment.url, f"{world.seed}/{event.at_s}", event.seconds) > 0


async def _garbage(world: World, event: Event) -> bool:
    """To every socket of every process; some connections stay open for a while."""

    def throw() -> list[socket.socket]:
        kept = []
        for process in world.processes():
            with contextlib.suppress(OSError):  # it ends at this moment
                kept += [connection for listener in listeners(process.pid) for connection in send_garbage(listener)]
        return kept

    kept = await asyncio.to_thread(throw)
    await asyncio.sleep(event.seconds)
    for connection in kept:
        connection.close()
    return bool(kept)


async def _burst(world: World, event: Event) -> bool:
    await world.load.burst(f"{world.seed}/{event.at_s}", BURST)
    return True


async def _full(world: World, event: Event) -> bool:
    """No room in the store or in shared memory for a while."""
    match event.kind:
        case "full server":
            return await _full_server(world, event)
        case "full disk":
            return await _full_disk(world, event)
        case _:
            return await _full_shared_memory(world, event)


async def _full_server(world: World, event: Event) -> bool:
    if not isinstance(world.server, RedisServer):
        return False  # LMCache's server has no bound
    import redis

    with redis.Redis.from_url(world.server.url) as client, contextlib.suppress(redis.RedisError):
        try:
            await asyncio.to_thread(client.config_set, "maxmemory", "1mb")
            await asyncio.sleep(event.seconds)
        finally:
            await asyncio.to_thread(client.config_set, "maxmemory", f"{STORE_MIB}mb")
    return True


def _new_filler(directory: Path) -> Path:
    """An empty file. Each event has its own: two of them may overlap."""
    descriptor, name = tempfile.mkstemp(prefix="filler-", dir=directory)
    os.close(descriptor)
    return Path(name)


async def _full_disk(world: World, event: Event) -> bool:
    assert world.files is not None
    if not world.private:
        engines = [process for name in world.site.engines if (process := world.process(name)) is not None]
        with _small_files(engines):
            await asyncio.sleep(event.seconds)
        return True
    filler = _new_filler(world.files)
    try:
        await asyncio.to_thread(fill, filler)
        await asyncio.sleep(event.seconds)
    finally:
        filler.unlink()
    return True


async def _full_shared_memory(world: World, event: Event) -> bool:
    """/dev/shm is full, and an engine that must start again gets no memory for its KV: it comes back afterwards."""
    fork_server, engine = world.process("fork-server"), world.process(event.target)
    if fork_server is None or engine is None:
        return False
    filler = _new_filler(SHM)
    try:
        with _small_files([fork_server]):
            if world.private:
                await asyncio.to_thread(fill, filler)
            world.journal.killed.add(engine.pid)
            engine.kill()
            await asyncio.sleep(event.seconds)
    finally:
        filler.unlink()
        for process in world.processes():  # also those that were forked meanwhile
            _limit_files(process, psutil.RLIM_INFINITY)
    return True


@contextlib.contextmanager
def _small_files(processes: list[psutil.Process]) -> Iterator[None]:
    """What these processes and their new children write into a file, or into shared memory, must be small."""
    for process in processes:
        _limit_files(process, _SMALL_FILE_BYTES)
    try:
        yield
    finally:
        for process in processes:
            _limit_files(process, psutil.RLIM_INFINITY)


def _limit_files(process: psutil.Process, num_bytes: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.rlimit(psutil.RLIMIT_FSIZE, (num_bytes, psutil.RLIM_INFINITY))


HANDLERS: dict[str, Callable[[World, Event], Awaitable[bool]]] = {
    "kill": _kill,
    "stop": _stop,
    "gone": _gone,
    "cut": _cut,
    "refuse": _refuse,
    "rude": _rude,
    "garbage": _garbage,
    "burst": _burst,
    "full": _full,
}
