"""A client for the router's operator socket (`router/http/pages/admin.py`)."""

import asyncio
import json
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.base.limits import clip
from pdkv.errors import ConfigError, MalformedMessage, StartupError
from pdkv.launch.run_dir import ADMIN_SOCKET
from pdkv.router.engines.address import EngineAddress
from pdkv.router.scaling.autoscaler import Told
from pdkv.router.scaling.scaler import Orders
from pdkv.wire.decoding import decode_total

PATIENCE_S = 30.0
"""Seconds for which a router that does not answer is asked again: a killed one is back within a second or two."""

_ENGINES = "/admin/engines"
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 0.5
_MAX_ANSWER_BYTES = 16 << 20
_decoder = msgspec.json.Decoder(dict[str, Any])


class Refused(ConfigError):
    """The router refuses a request; the message says why."""

    code = "refused"


class RouterAdmin:
    """Calls to the router. Every call may be repeated, and is, if a router dies before answering it."""

    def __init__(self, run_dir: Path, *, patience_s: float = PATIENCE_S) -> None:
        self._path = run_dir / ADMIN_SOCKET
        self._patience_s = patience_s

    async def engines(self, *, fresh: bool = False) -> list[dict[str, Any]]:
        """All engines, as in `/topology`. `fresh`: ask them for a report first."""
        answer = await self._call("GET", f"{_ENGINES}?fresh=true" if fresh else _ENGINES)
        return list(answer["engines"])

    async def figures(self) -> dict[str, float]:
        """The router's metrics without labels, by name."""
        return {name: float(value) for name, value in (await self._call("GET", "/admin/figures")).items()}

    async def caches(self) -> list[dict[str, Any]]:
        """The contents and hits of each engine's pool and tiers."""
        answer = await self._call("GET", "/admin/cache")
        return list(answer["engines"])

    async def order_cache(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """Look up, clear, pin, unpin, prefetch or move a prompt's KV (router/http/pages/cache_pages.py)."""
        return await self._call("POST", f"/admin/cache/{action}", body, busy_s=float(body.get("timeout_s", 0.0)))

    async def drain(self, name: str, wait_s: float, *, move: bool = False) -> dict[str, Any]:
        """Stop giving an engine new requests; returns once it is drained, or after `wait_s`.

        `move`: requests that it still has then are moved elsewhere.
        """
        path = f"{_of(name)}/drain?move={'true' if move else 'false'}"
        return await self._call("POST", path, wait_s=wait_s)

    async def resume(self, name: str) -> dict[str, Any]:
        """Give an engine new requests again."""
        return await self._call("POST", f"{_of(name)}/resume")

    async def split(self, shares: Mapping[str, float]) -> dict[str, float]:
        """Change the percentage of requests for the launch's own model that each of these pools runs; returns all."""
        return dict((await self._call("POST", "/admin/split", {"shares": shares}))["shares"])

    async def set_role(self, name: str, role: str) -> dict[str, Any]:
        """Give an engine another role."""
        return await self._call("POST", f"{_of(name)}/role", {"role": role})

    async def wait_ready(self, name: str, pid: int | None, wait_s: float) -> dict[str, Any]:
        """The engine's description once its incarnation `pid` is ready, or after `wait_s`."""
        which = f"&pid={pid}" if pid is not None else ""
        return await self._call("GET", f"{_of(name)}?until=ready{which}", wait_s=wait_s)

    async def autoscale(self, told: Told) -> Orders:
        """Say what the launcher is doing; returns what it should do."""
        answer = await self._call("POST", "/admin/autoscaler", msgspec.to_builtins(told))
        try:
            return msgspec.convert(answer, Orders)
        except msgspec.ValidationError as error:
            raise StartupError(f"the router sent an invalid answer: {error}") from None

    async def add(self, address: EngineAddress) -> None:
        """Add an engine."""
        refusal = str(address.refusal) if address.refusal is not None else None
        body = {"role": address.role, "endpoint": address.endpoint, "refusal": refusal}
        await self._call("PUT", _of(address.name), body)

    async def remove(self, name: str) -> None:
        """Remove an engine; requests that it still has end or are moved elsewhere."""
        await self._call("DELETE", f"{_of(name)}?force=true")

    async def _call(
        self, method: str, path: str, body: object = None, *, wait_s: float | None = None, busy_s: float = 0.0
    ) -> dict[str, Any]:
        """The answer of the first router that gives one.

        `wait_s`: how long it may wait before it answers; this is added to the query in `path`, and each router gets the
        time that is left. `busy_s`: how long it may work on the body's request.

        Raises:
            Refused: it refuses.
            StartupError: there was no answer in time, the router has a defect, or the answer is invalid.
        """
        pause_s = _FIRST_PAUSE_S
        deadline = MONOTONIC.now() + (wait_s or 0.0)
        try:
            async with asyncio.timeout((wait_s or 0.0) + busy_s + self._patience_s):
                while True:
                    wait = f"&wait_s={max(deadline - MONOTONIC.now(), 0.0):g}" if wait_s is not None else ""
                    try:
                        return _checked(*await self._ask(method, path + wait, body))
                    except (OSError, EOFError):  # there is no listener, or it died before answering
                        await MONOTONIC.pause(pause_s)
                        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        except TimeoutError:
            raise StartupError(f"the router does not answer at {self._path}") from None

    async def _ask(self, method: str, path: str, body: object) -> tuple[int, bytes]:
        reader, writer = await asyncio.open_unix_connection(str(self._path), limit=_MAX_ANSWER_BYTES)
        try:
            data = json.dumps(body).encode() if body is not None else b""
            head = f"{method} {path} HTTP/1.1\r\nhost: router\r\nconnection: close\r\n"
            writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
            status, size = _parse_head(await reader.readuntil(b"\r\n\r\n"))
            return status, await reader.readexactly(size)
        except asyncio.LimitOverrunError as error:
            raise StartupError(f"the router sent an invalid answer: {error}") from None
        finally:
            writer.close()


def _parse_head(data: bytes) -> tuple[int, int]:
    """An answer's status, and its body's size in bytes. Raises StartupError."""
    first, *lines = data.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    status, size = first.split(" ")[1:2], headers.get("content-length", "")
    if not (status and status[0].isdecimal() and size.isdecimal() and int(size) <= _MAX_ANSWER_BYTES):
        raise StartupError(f"the router sent an invalid answer: {clip(ascii(data))}")
    return int(status[0]), int(size)


def _checked(status: int, data: bytes) -> dict[str, Any]:
    """The content of an answer. Raises Refused for a refusal, and StartupError for a defect of the router."""
    try:
        answer = decode_total(_decoder, data)
        message = answer["error"]["message"] if status != 200 else ""
    except (MalformedMessage, KeyError, TypeError):
        raise StartupError(f"the router answers with status {status}: {clip(ascii(data))}") from None
    if 400 <= status < 500:
        raise Refused(message)
    if status != 200:
        raise StartupError(f"the router answers with status {status}: {message}")
    return answer


def _of(name: str) -> str:
    """The path of an engine. Raises ConfigError for an invalid engine name."""
    if "/" in name or name in ("", ".", ".."):
        raise ConfigError(f"{clip(name)!r} is not a valid engine name: see `pd engines`")
    return f"{_ENGINES}/{urllib.parse.quote(name, safe='')}"
