"""Does a fault to a deployment while a load runs, and undoes what has an end."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from deployments import Running
from store_servers import StoreServer
from traffic import BOUND_S, stop_process

from faults.cells import Cell
from faults.load import LONG, PROMPTS, Load
from faults.moments import Watch, admin_of, go_on, is_there, requests_of
from faults.sockets import cut, is_of_transfers, is_to_router

_LOOK_S = 0.02


@dataclass
class Site:
    """What faults are done to."""

    deployment: Running
    server: StoreServer | None = None  # where all engines keep KV
    switch: Path | None = None  # while it exists, hand-offs are refused (connector/refusing.py)
    stop_s: float = 10.0
    num_long: int = 24  # requests that fill a pool
    refused_s: float = 2.0


@dataclass
class Strike:
    """When it happened, and to how many requests that were where the cell says."""

    at: float = 0.0
    num_there: int = 0


async def inject(site: Site, cell: Cell, load: Load, strike: Strike, struck: asyncio.Event) -> None:
    """Do it at the cell's moment and set the event; return when it is over."""
    loop = asyncio.get_running_loop()

    def happens(num_there: int) -> None:
        strike.at, strike.num_there = loop.time(), num_there
        struck.set()

    async with admin_of(site.deployment) as admin:
        match cell.kind:
            case "refused transfer":
                async with _refused(site):
                    first = len(load.tasks)
                    happens(0)
                    await asyncio.sleep(site.refused_s)
                    async with asyncio.timeout(BOUND_S):  # a hand-off of one that came later was refused
                        while not any(task.done() for task in load.tasks[first:]):
                            await asyncio.sleep(_LOOK_S)
            case "full pool":
                happens(0)
                strike.num_there = await _fill(site, cell, load, admin)
            case "stop, 1.5 s limit":
                pid = site.deployment.pids()[cell.engine]
                stop_process(pid)
                happens(len([r for r in await requests_of(admin, load.label) if is_there(r, cell)]))
                await _go_on_behind(pid, load.over.wait())
            case _:
                await _at_the_moment(site, cell, load, admin, happens)


async def _at_the_moment(
    site: Site, cell: Cell, load: Load, admin: httpx.AsyncClient, happens: Callable[[int], None]
) -> None:
    engine = cell.engine
    pid = site.deployment.pids()[engine]
    held, there = await Watch(site.deployment, admin, cell, load.label).hold()
    stops = cell.kind == "stop"
    try:
        match cell.kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "cut":
                assert cut(pid, engine, is_to_router), f"{engine} is not connected"
            case "cut transfer":
                assert cut(pid, engine, is_of_transfers), f"{engine} has no connection for transfers"
            case _:
                stop_process(pid)
        happens(len(there))
    finally:
        go_on([other for other in held if other != pid or not stops])
    if stops:
        await _go_on_behind(pid, asyncio.sleep(site.stop_s))


async def _go_on_behind(pid: int, wait: Coroutine[Any, Any, object]) -> None:
    try:
        await wait
    finally:
        go_on([pid])


@asynccontextmanager
async def _refused(site: Site) -> AsyncIterator[None]:
    if site.switch is not None:
        site.switch.touch()
        try:
            yield
        finally:
            site.switch.unlink()
        return
    import redis

    assert site.server is not None
    with redis.Redis.from_url(site.server.url) as client:
        client.acl_setuser("default", enabled=True, categories=["-@all"], commands=["+acl|setuser"])
        try:
            yield
        finally:
            client.acl_setuser("default", enabled=True, categories=["+@all"])


async def _fill(site: Site, cell: Cell, load: Load, admin: httpx.AsyncClient) -> int:
    """Many long requests at once. Returns how many waited for blocks, or were put back for want of them, at most.

    The engines of this deployment hold little more than one request each.
    """
    role = cell.place.role
    which = 0 if role == "prefill" else 1
    first = len(load.tasks)
    for _ in range(site.num_long):
        load.begin(LONG[which], len(PROMPTS) + which)
    burst = load.tasks[first : first + site.num_long]
    most = 0
    while not all(task.done() for task in burst):
        engines = (await admin.get("/admin/engines")).json()["engines"]
        most = max(most, sum(engine["waiting"] for engine in engines if engine["role"] == role))
        await asyncio.sleep(_LOOK_S)
    assert most, f"no request ever waited for blocks of {role}"
    return most
