"""What must hold when everything is calm again: all blocks back, nothing left in memory, on disk or in the kernel."""

import asyncio
import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from traffic import holdings, unrest

from soak.accounts import accounts
from soak.private_mounts import SHM
from soak.router_memory import Sample
from soak.world import World

CALM_BOUND_S = 90.0
"""All engines are back and idle: the launcher waits up to 30 s before it starts a failing engine again."""

LET_GO_BOUND_S = 15.0
_POLL_S = 0.2
_STALL = re.compile(r"router: the event loop was held up for .* in (?P<place>\S+): (?P<kind>\w+)$")
_DEATH = re.compile(r"launcher: (?P<name>\S+) \(pid (?P<pid>\d+)\) (?P<how>killed by \w+|exited with \d+)")
MAX_MORE_DESCRIPTORS = 12
"""Of those that may have met more peers, or have more connections to a store, than before. Others get none."""

_CONNECTED = ("pd prefill", "pd decode", "pdkv-mooncake")
"""Engines, and Mooncake's client, which keeps its connections to a lender that was killed."""

_ROUTER = "pd router"
MAX_RSS_FACTOR = 1.35
MAX_RSS_MORE = 32 << 20


class Held(NamedTuple):
    """What is held at rest."""

    descriptors: dict[str, int]  # by process name
    resident: dict[str, int]  # bytes
    files: int  # in the launch's temporary directory
    shm: int  # in /dev/shm, of this run where it is private
    strangers: int  # connections, which `descriptors` leaves out
    processes: dict[str, int]  # how many of each name; without the fork server, which comes when it is needed
    clients: int  # connections to the router of others than this process


async def wait_for_calm(world: World) -> None:
    """Every engine ready, without a request, all blocks free or cached; no request on the router."""
    deadline = time.monotonic() + CALM_BOUND_S
    while (why := await asyncio.to_thread(_commotion, world)) is not None:
        if time.monotonic() > deadline:
            world.journal.violation(f"no rest within {CALM_BOUND_S:g} s: {why}")
            return
        await asyncio.sleep(_POLL_S)


def _commotion(world: World) -> str | None:
    try:
        if restless := unrest(world.deployment):
            return str(restless)
        if open_ := [account for account in accounts(world.deployment.get("/metrics").text) if account.value]:
            return ", ".join(map(str, open_))
    except (httpx.TransportError, KeyError, ValueError) as error:  # the router is starting
        return repr(error)
    return None


def check_not_negative(world: World) -> None:
    """At any moment: nobody has struck anything twice from the router's books."""
    with contextlib.suppress(httpx.TransportError, ValueError):  # the router is starting
        for account in accounts(world.deployment.get("/metrics").text):
            if account.value < 0:
                world.journal.violation(f"below zero: {account}")


def router_memory(world: World) -> Sample | None:
    """Of now; None: there is no router."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if (router := world.process("router")) is not None:
            return Sample(world.journal.elapsed_s, router.pid, router.memory_info().rss)
    return None


def check_log(world: World) -> None:
    """Nobody died but who was killed, and the ranks of an engine whose other rank was killed or stopped; no defect
    showed itself as an exception that nobody expected.
    """
    for number, line in enumerate(world.deployment.lines):
        death = _DEATH.search(line)
        excused = death is not None and (
            int(death["pid"]) in world.journal.killed
            or (death["how"] == "exited with 1" and any(death["name"] in name for name in world.site.other_ranks))
        )
        if death is not None and not excused:
            world.journal.violation(f"{death['name']} died by itself: {death['how']}")
        if line.lstrip().startswith("Traceback"):  # of a logged exception it is indented
            world.journal.violation("an exception: " + "\n".join(world.deployment.lines[number : number + 40]))


def loop_stalls(lines: Iterable[str]) -> dict[str, int]:
    """What held a router's event loop for longer than 20 ms, by place and kind; of each second the first at most."""
    found = (match for line in lines if (match := _STALL.search(line)) is not None)
    return dict(Counter(f"{match['place']} ({match['kind']})" for match in found).most_common())


def measure(world: World) -> Held:
    """Read /proc and the directories."""
    held = holdings(world.deployment)
    strangers = _strangers(world)

    def by_name(values: dict[str, int]) -> dict[str, int]:
        return {name.rpartition(" ")[0]: value for name, value in values.items()}

    files = sum(1 for _ in world.deployment.directory.rglob("*"))
    shm = len(os.listdir(SHM)) if world.private else len(held.shared_memory_files)
    own, others = _clients(world)
    strangers_and_clients = {**strangers, _ROUTER: own + others}
    descriptors = {
        name: count - strangers_and_clients.get(name, 0) for name, count in by_name(held.descriptors).items()
    }
    processes = Counter(name.rpartition(" ")[0] for name in held.descriptors)
    processes.pop("pd fork-server", None)
    return Held(
        descriptors, by_name(held.resident), files, shm, sum(strangers.values()), dict(processes), clients=others
    )


def _clients(world: World) -> tuple[int, int]:
    """Connections of clients that the router has: of this process, and of others, who all should be gone."""
    router = world.process("router")
    if router is None:
        return 0, 0
    ours = {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.raddr}
    theirs = [c.raddr.port for c in router.net_connections("tcp") if c.raddr]
    own = sum(port in ours for port in theirs)
    return own, len(theirs) - own


def _strangers(world: World) -> dict[str, int]:
    """Connections of strangers that are kept, by process name: one descriptor each, until the engine ends.

    Gloo, between the ranks of an engine, listens as long as its group lives and never closes what it does not
    understand; nothing can be done about it from outside.
    """
    kept: dict[str, int] = {}
    for process in world.processes():
        with contextlib.suppress(psutil.Error):
            name = process.name()
            if not any(name.partition(".")[0] == f"pd {rank.partition('.')[0]}" for rank in world.site.other_ranks):
                continue
            connections = process.net_connections("tcp")
            ports = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
            kept[name] = sum(c.status == psutil.CONN_CLOSE_WAIT and c.laddr.port in ports for c in connections)
    return kept


async def check_let_go(world: World, baseline: Held) -> Held:
    """Wait until nothing more is held than at the baseline, and say what is."""
    deadline = time.monotonic() + LET_GO_BOUND_S
    while leaks := await asyncio.to_thread(_leaks, world, baseline):
        if time.monotonic() > deadline:
            for leak in leaks:
                world.journal.violation(f"a leak: {leak}")
            for process in world.processes():
                world.journal.note(f"{process.name()} {process.pid}: {_descriptors(process)}")
            break
        await asyncio.sleep(_POLL_S)
    return measure(world)


def _leaks(world: World, baseline: Held) -> list[str]:
    now = measure(world)
    found = [
        f"{name} has {count} descriptors, {baseline.descriptors[name]} at first"
        for name, count in now.descriptors.items()
        if count > baseline.descriptors.get(name, count) + (name.startswith(_CONNECTED) and MAX_MORE_DESCRIPTORS)
    ]
    if now.processes != baseline.processes:
        found.append(f"there are the processes {now.processes}, {baseline.processes} at first")
    if now.clients:
        found.append(f"the router has {now.clients} connections of clients that are gone")
    found += [
        f"{name} has {size >> 20} MiB, {baseline.resident[name] >> 20} at first"
        for name, size in now.resident.items()
        if size > MAX_RSS_FACTOR * (most := _most(baseline.resident, name)) + MAX_RSS_MORE and most
    ]
    if now.files > baseline.files:
        found.append(f"{now.files} files in the temporary directory, {baseline.files} at first")
    if now.shm > baseline.shm:
        found.append(f"{now.shm} files in /dev/shm, {baseline.shm} at first")
    if orphans := _orphaned_memory([process.pid for process in world.processes()]):
        found.append(f"shared memory of processes that are gone is still mapped: {orphans}")
    if world.files is not None and (unfinished := [path.name for path in world.files.rglob("*.tmp")]):
        found.append(f"unfinished files in the store: {unfinished}")
    return found


def _descriptors(process: psutil.Process) -> str:
    """Open files by what they are, and where connections lead, to find a leak by."""
    kinds: Counter[str] = Counter()
    for fd in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            kinds[os.readlink(fd).partition(":[")[0]] += 1
    connections = [(c.status, *c.laddr[1:2], *c.raddr[1:2]) for c in process.net_connections("inet")]
    return f"{dict(kinds)}, TCP {connections}"


def _most(values: dict[str, int], name: str) -> int:
    """The largest among processes of the same kind ("pd decode-0" and "pd decode-1")."""
    kind = name.rpartition("-")[0] or name
    return max((value for other, value in values.items() if (other.rpartition("-")[0] or other) == kind), default=0)


def _orphaned_memory(pids: Iterable[int]) -> list[str]:
    """Mapped KV arenas that no process of the launch has open any more."""
    mapped: dict[str, str] = {}
    open_inodes = set()
    for pid in pids:
        try:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if "/memfd:pdkv:" in line:
                    fields = line.split(maxsplit=5)
                    mapped[fields[4]] = f"{fields[5]} in {pid}"
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                open_inodes.add(str(fd.stat().st_ino))
        except OSError:  # it ends at this moment
            continue
    return [name for inode, name in mapped.items() if inode not in open_inodes]
