"""An engine on a node of a Ray cluster: an actor starts it as its child, passes on what it says, and takes it along
when it dies.
"""

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from pdkv.config import HandoffConfig, TiersConfig
from pdkv.errors import ConfigError, PdkvError, StartupError
from pdkv.launch.children import Child
from pdkv.launch.host_memory import DIRECTORY, HostMemory
from pdkv.launch.kv_tiers import plan_with_tiers
from pdkv.launch.logs import configure_logging
from pdkv.launch.plan import check_memory, place_on_hardware
from pdkv.launch.run_dir import RunDirectory, sweep_leftovers
from pdkv.launch.specs import EngineSpec, Identified, Progress, Started, StartFailed, decode, encode
from pdkv.launch.starter import Children, LocalStarter

KEY_FILE = "cluster.key"

_PORTS = range(20_000, 32_000, 2)
"""Ports of engines and, next to each, of their heartbeats: below those that Linux gives to clients."""

_CHUNK_BYTES = 64 * 1024
_MAX_WAITING = 256  # events that Ray has not carried yet, from which on log lines are dropped


class Order(msgspec.Struct, frozen=True):
    """What an actor gets: the engine, planned without knowledge of its node, and what the node's files do not have."""

    spec: EngineSpec
    tiers: TiersConfig
    key: str  # the cluster's secret

    def __repr__(self) -> str:
        return f"Order({self.spec.name})"


class LogLines(msgspec.Struct, frozen=True, tag=True):
    """Lines that the engine has written to its log."""

    text: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """The last event: every rank is gone. The exit status is that of the first one; -N if signal N killed it."""

    status: int


Event = Progress | Identified | Started | StartFailed | LogLines | Exited
decode_event = msgspec.json.Decoder(Event).decode

Tell = Callable[[Event], None]


class EngineActor:
    """One incarnation of an engine, all of its ranks. Its methods run in an event loop of Ray's."""

    def __init__(self) -> None:
        self._children: Children | None = None

    async def run(self, order: bytes) -> AsyncIterator[bytes]:
        """Start the engine of an `Order` and wait for its end; yields `Event`s as JSON."""
        events: asyncio.Queue[Event] = asyncio.Queue()
        life = asyncio.create_task(self._live(order, events))
        event: Event | None = None
        while not isinstance(event, Exited):
            event = await events.get()
            yield encode(event)
        await life

    async def signal(self, number: int) -> None:
        """Send a signal to each rank."""
        for child in list(self._children.running) if self._children is not None else ():
            child.send_signal(signal.Signals(number))

    async def _live(self, order: bytes, events: "asyncio.Queue[Event]") -> None:
        status = 1
        try:
            status = await self._serve(decode(order, Order), events)
        except Exception as error:
            message = str(error) if isinstance(error, PdkvError) else f"{type(error).__name__}: {error}"
            events.put_nowait(StartFailed(message, config=isinstance(error, ConfigError)))
        finally:
            events.put_nowait(Exited(status))

    async def _serve(self, order: Order, events: "asyncio.Queue[Event]") -> int:
        """Run the engine to its end; returns its exit status. Raises PdkvError if it does not start."""
        tell = events.put_nowait
        sweep_leftovers()
        with RunDirectory() as run_dir, _lifeline() as lifeline_fd, _log_taken(events):
            configure_logging(f"{order.spec.name}'s host", order.spec.log_level, order.spec.log_format)
            spec = settle(order, run_dir, _own_address())
            with HostMemory(run_dir.path, order.tiers.kv_host_memory) as memory:
                memory.keep(spec)
                self._children = Children(
                    spec.start_timeout_s, lambda _, text: tell(Progress(text)), lambda _, model: tell(Identified(model))
                )
                starter = LocalStarter(self._children, lifeline_fd, spec.connector.build, use_fork_server=False)
                try:
                    ranks = await starter.start(spec)
                    tell(Started(ranks[0].pid, spec.endpoint))
                    return await _first_end(ranks)
                finally:
                    await self._children.kill(list(self._children.running))


def settle(order: Order, run_dir: RunDirectory, host: str) -> EngineSpec:
    """The engine on this node: its address, key file, connector, devices and memory. Raises ConfigError."""
    spec, tiers = order.spec, order.tiers
    key_file = write_key(run_dir, order.key)
    check_memory([(spec.config, 1)], tiers)
    spec = msgspec.structs.replace(
        spec,
        run_dir=run_dir.path,
        endpoint=f"tcp://{f'[{host}]' if ':' in host else host}:{_free_port(host)}",
        connector=plan_with_tiers(_reached_at(host, spec.handoff), tiers, run_dir.path / DIRECTORY, spec.name),
        store=run_dir.path / f"{spec.name}.ranks" if spec.config.tp > 1 else None,
        cluster_key_file=key_file,
    )
    return place_on_hardware([spec], tiers)[0]


def write_key(run_dir: RunDirectory, secret: str) -> Path:
    """A file with the cluster's secret, for this user alone."""
    path = run_dir.path / KEY_FILE
    path.touch(mode=0o600)
    path.write_text(secret)
    return path


def _reached_at(host: str, handoff: HandoffConfig) -> HandoffConfig:
    """The hand-off with the address of this node, where a connector needs one and none was given."""
    options = dict(handoff.connector_config)
    if handoff.connector == "p2p":
        options.setdefault("host", host)
    elif "p2p" in [name.strip() for name in options.get("connectors", "").split(",")]:
        options.setdefault("p2p.host", host)
    return HandoffConfig(**{**vars(handoff), "connector_config": options})


def _own_address() -> str:
    import ray.util

    return str(ray.util.get_node_ip_address())


def _free_port(host: str) -> int:
    """A port that is free now, like the next one. Raises StartupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket(family) as own, socket.socket(family) as beats, contextlib.suppress(OSError):
            own.bind((host, port))
            beats.bind((host, port + 1))
            return port
    raise StartupError(f"no two adjacent ports of {_PORTS.start} to {_PORTS.stop} are free at {host}")


@contextlib.contextmanager
def _lifeline() -> Any:
    """The reading end of a pipe whose other end is this process's alone: the engine ends when it does, and it ends with
    its node's raylet, its parent: Ray leaves an actor behind when the head is lost.
    """
    read_fd, write_fd = os.pipe()
    raylet_fd = os.pidfd_open(os.getppid())
    asyncio.get_running_loop().add_reader(raylet_fd, os._exit, 1)
    try:
        yield read_fd
    finally:
        asyncio.get_running_loop().remove_reader(raylet_fd)
        for fd in (raylet_fd, write_fd, read_fd):
            os.close(fd)


@contextlib.contextmanager
def _log_taken(events: "asyncio.Queue[Event]") -> Any:
    """Pass on as events what this process and its children write to their standard error."""
    loop, rest, num_dropped = asyncio.get_running_loop(), b"", 0
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(write_fd, True)

    def take() -> None:
        nonlocal rest, num_dropped
        *lines, rest = (rest + os.read(read_fd, _CHUNK_BYTES)).split(b"\n")
        if len(rest) >= _CHUNK_BYTES:  # of a line without an end
            lines, rest = [*lines, rest], b""
        if events.qsize() > _MAX_WAITING:
            num_dropped += len(lines)
            return
        if num_dropped:
            lines.insert(0, b"%d log lines were lost because Ray did not carry them" % num_dropped)
            num_dropped = 0
        if lines:
            events.put_nowait(LogLines(b"\n".join(lines).decode(errors="replace")))

    own = os.dup(2)
    os.dup2(write_fd, 2)
    os.close(write_fd)
    loop.add_reader(read_fd, take)
    try:
        yield
    finally:
        with contextlib.suppress(BlockingIOError):  # nothing is left
            while True:
                take()
        loop.remove_reader(read_fd)
        os.dup2(own, 2)
        os.close(own)
        os.close(read_fd)


async def _first_end(ranks: list[Child]) -> int:
    waits = [asyncio.ensure_future(rank.wait()) for rank in ranks]
    done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in others:
        wait.cancel()
    return done.pop().result()
