"""The router's HTTP server in this process on a real socket, around any application, and a client of raw bytes."""

import asyncio
import contextlib
import functools
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from pdkv.config import HttpLimits
from pdkv.router.http.app import body_budget
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.certificates import Tls
from pdkv.router.http.server.connections import Connections
from pdkv.router.process import server_config


class Serving(NamedTuple):
    """A server that runs."""

    port: int
    state: ServerState
    bodies: ByteBudget
    room: Connections


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp,
    limits: HttpLimits | None = None,
    *,
    max_connections: int = 1000,
    bodies: ByteBudget | None = None,
    tls: Tls | None = None,
) -> AsyncIterator[Serving]:
    """Serve `app` until the end of the block; `bodies` is the budget that it was made with."""
    limits = limits or HttpLimits()
    bodies = bodies or body_budget(limits)
    room = Connections(max_connections)
    config = server_config(app, limits, bodies, room, tls)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    protocol = functools.partial(config.http_protocol_class, config, state, {}, loop)
    server = await loop.create_server(protocol, "127.0.0.1", 0)
    try:
        yield Serving(server.sockets[0].getsockname()[1], state, bodies, room)
    finally:
        server.close()
        for connection in list(state.connections):
            connection.evict()
        await asyncio.gather(*state.tasks)
        while state.connections:
            await asyncio.sleep(0)
    assert bodies.held == 0


class Reply(NamedTuple):
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        body = json.loads(self.body)
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]


class Client:
    """One connection. Nothing is sent but what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        """The next response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.reader.readuntil(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            await self.reader.readexactly(2)
        else:
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Reply(int(head[0].split()[1]), headers, body)

    async def at_end(self) -> bool:
        """Whether nothing more comes, once the server has closed. A reset is no clean end and raises."""
        return await self.reader.read(1) == b""


@contextlib.asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """A client's connection, through TLS where there is a context."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A whole request."""
    lines = [f"POST {path} HTTP/1.1", "host: test", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def get(path: str, *headers: str) -> bytes:
    """A whole request without a body."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "host: test", *headers, "", ""]).encode()
