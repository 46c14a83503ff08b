"""Waits until a request is where a fault shall meet it, as the router sees it, and holds the moment.

An engine that is stopped (SIGSTOP) for less than it takes to become a suspect keeps the requests that it has where they
are, and those that come to it: what is seen then is still so when the fault comes.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from deployments import Running
from traffic import stop_process

from faults.cells import SOURCE, Cell

BOUND_S = 30.0
HOLD_S = 0.35
"""Shorter than what makes an engine a suspect (docs/health.md)."""

PAUSE_S = 0.3
PATIENCE_S = 3.0
"""A prompt or a stream that runs is met by itself within so long, or the engine is stopped until one comes."""

_SETTLE_S = 0.015
"""What an engine had said when it was stopped is with the router after so long."""

_MIDDLE = range(8, 48)
"""Tokens of an output of 60."""


@contextlib.asynccontextmanager
async def admin_of(deployment: Running) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the operators' socket."""
    (socket,) = deployment.directory.glob(f"pdkv-{deployment.process.pid}-*/admin.sock")
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with httpx.AsyncClient(base_url="http://admin", transport=transport, timeout=30) as client:
        yield client


async def requests_of(admin: httpx.AsyncClient, label: str) -> list[dict[str, Any]]:
    """What is known of the requests with that x-request-id."""
    reply = await admin.get(f"/admin/requests/{label}")
    return list(reply.json()["requests"]) if reply.status_code == 200 else []


def is_there(request: dict[str, Any], cell: Cell) -> bool:
    """Whether a request is where the cell wants it; its state is that of request_log.py."""
    if request["state"] != "running":
        return False
    prefill, decode = request["prefill"], request["decode"]
    if cell.place.moment == "on prefill":
        return bool(prefill["engine"] == cell.engine and prefill["state"] == "running" and not request["output_tokens"])
    if cell.place.moment == "mid-stream":
        return bool(decode["engine"] == cell.engine and request["output_tokens"] in _MIDDLE)
    loaded = any(t["attempt"] == request["attempt"] for t in request["transfers"]) or request["output_tokens"] > 1
    under_way = request["output_tokens"] == 1 and decode["state"] == "running" and not loaded
    return bool(under_way and cell.engine in (prefill["engine"], decode["engine"]))


async def hold(
    deployment: Running, admin: httpx.AsyncClient, cell: Cell, label: str
) -> tuple[list[int], list[dict[str, Any]]]:
    """Return at the moment: the pids stopped for it (SIGCONT is the caller's), and the requests that are there.

    Where prefill is what the fault is about and a transfer is under way, those that wait for it are stopped.
    """
    pids = deployment.pids()
    names = [cell.engine] if cell.place != SOURCE else [name for name in pids if name.startswith("decode")]
    held = [pids[name] for name in names]
    began = time.monotonic()
    while time.monotonic() < began + BOUND_S:
        stops = cell.place.moment == "in transfer" or time.monotonic() > began + PATIENCE_S
        try:
            if there := await _look(admin, cell, label, held, stops=stops):
                return held, there
        except BaseException:
            go_on(held)
            raise
        go_on(held)
        await asyncio.sleep(PAUSE_S if stops else 0)
    raise AssertionError(f"no request was {cell.place.moment} at {cell.engine} within {BOUND_S} s")


async def _look(
    admin: httpx.AsyncClient, cell: Cell, label: str, held: Sequence[int], *, stops: bool
) -> list[dict[str, Any]]:
    """Look for a while; `stops`: at engines that are stopped meanwhile. Who is there is there once they are stopped."""

    async def there() -> list[dict[str, Any]]:
        return [request for request in await requests_of(admin, label) if is_there(request, cell)]

    async def stop() -> None:
        for pid in held:
            stop_process(pid)
        await asyncio.sleep(_SETTLE_S)

    if stops:
        await stop()
    until = time.monotonic() + HOLD_S
    while time.monotonic() < until:
        if found := await there():
            if stops:
                return found
            await stop()
            return await there()
        await asyncio.sleep(_SETTLE_S if stops else 0.002)
    return []


def go_on(pids: Sequence[int]) -> None:
    """SIGCONT to those that are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
