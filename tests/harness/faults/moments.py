"""Waits until a request is where a fault shall meet it, as the router sees it, and holds the moment.

An engine that is stopped (SIGSTOP) for less than it takes to become a suspect keeps the requests that it has where they
are, and those that come to it: what is seen then is still so when the fault comes.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from deployments import NO_AUTHORITIES, Running
from traffic import stop_process

from faults.cells import Cell

BOUND_S = 30.0
HOLD_S = 0.35
"""Shorter than what makes an engine a suspect (docs/health.md)."""

PAUSE_S = 0.2
PATIENCE_S = 3.0
"""A prompt or a stream that runs is met by itself within so long, or the engine is stopped until one comes."""

LOOK_S = 0.005
_SETTLE_S = 0.015
"""What an engine had said when it was stopped is with the router after so long."""

_MIDDLE = range(8, 48)
"""Tokens of an output of 60."""


@contextlib.asynccontextmanager
async def admin_of(deployment: Running) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the operators' socket."""
    transport = httpx.AsyncHTTPTransport(uds=str(deployment.run_dir / "admin.sock"), verify=NO_AUTHORITIES)
    async with httpx.AsyncClient(base_url="http://admin", transport=transport, timeout=30) as client:
        yield client


async def requests_of(admin: httpx.AsyncClient, label: str) -> list[dict[str, Any]]:
    """What is known of the requests with that x-request-id."""
    reply = await admin.get(f"/admin/requests/{label}")
    return list(reply.json()["requests"]) if reply.status_code == 200 else []


def is_there(request: dict[str, Any], cell: Cell) -> bool:
    """Whether a request is where the cell wants it; its state is that of generation_records.py."""
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


def is_asked(request: dict[str, Any], cell: Cell) -> bool:
    """Whether its prompt is with prefill, and the hand-off may be what the cell wants."""
    prefill, decode = request["prefill"], request["decode"]
    asked = request["state"] == "running" and prefill["state"] == "running" and not request["output_tokens"]
    return bool(asked and cell.engine in (prefill["engine"], decode["engine"] or cell.engine))


@dataclass
class Watch:
    """Looks at the requests of one label for where a cell wants them."""

    deployment: Running
    admin: httpx.AsyncClient
    cell: Cell
    label: str

    async def hold(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Return at the moment: the pids stopped for it (SIGCONT is the caller's), and the requests that are there."""
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < BOUND_S:
            match self.cell.place.moment:
                case "in transfer":
                    found = await self._meet_transfer()
                case _ if waited_s < PATIENCE_S:
                    found = await self._meet_running()
                case _:
                    found = await self._meet_arriving()
            if found[1]:
                return found
            await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"no request was {self.cell.place.moment} at {self.cell.engine} within {BOUND_S} s")

    def _pids(self, role: str) -> list[int]:
        """Of the cell's engine if it has that role, else of all that have it."""
        mine = role == self.cell.place.role
        pids = self.deployment.pids().items()
        return [pid for name, pid in pids if (name == self.cell.engine if mine else name.startswith(role))]

    async def _there(self, seconds: float, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
        """Those that are as wanted, once there are any within so long."""
        until = time.monotonic() + seconds
        while True:
            if found := [request for request in await requests_of(self.admin, self.label) if wanted(request)]:
                return found
            if time.monotonic() >= until:
                return []
            await asyncio.sleep(LOOK_S)

    def _is_there(self, request: dict[str, Any]) -> bool:
        return is_there(request, self.cell)

    async def _meet_running(self) -> tuple[list[int], list[dict[str, Any]]]:
        """The engine is stopped when somebody is there."""
        pids = self._pids(self.cell.place.role)
        if not await self._there(HOLD_S, self._is_there):
            return [], []
        return await self._while_stopped(pids, 0, self._is_there)

    async def _meet_arriving(self) -> tuple[list[int], list[dict[str, Any]]]:
        """The engine is stopped until somebody is there."""
        return await self._while_stopped(self._pids(self.cell.place.role), HOLD_S, self._is_there)

    async def _meet_transfer(self) -> tuple[list[int], list[dict[str, Any]]]:
        """Prefill is stopped until it has a prompt and, for a push, its ticket; then decode, until it is handed off."""
        sources, targets = self._pids("prefill"), self._pids("decode")
        _, asked = await self._while_stopped(sources, HOLD_S, lambda request: is_asked(request, self.cell))
        if not asked:
            return [], []
        try:
            return await self._while_stopped(targets, HOLD_S, self._is_there, sources)
        finally:
            go_on(sources)

    async def _while_stopped(
        self, pids: list[int], seconds: float, wanted: Callable[[dict[str, Any]], bool], released: Sequence[int] = ()
    ) -> tuple[list[int], list[dict[str, Any]]]:
        """Stop them, let the released ones go on, and look. They stay stopped if somebody is as wanted."""
        found: list[dict[str, Any]] = []
        try:
            for pid in pids:
                stop_process(pid)
            go_on(released)
            await asyncio.sleep(_SETTLE_S)
            found = await self._there(seconds, wanted)
        finally:
            if not found:
                go_on(pids)
        return pids, found


def go_on(pids: Sequence[int]) -> None:
    """SIGCONT to those that are there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
