"""A response's head leaves with what follows it, or in the next turn of the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvloop
from coroutines import run
from http_server import connected, get, serving
from starlette.types import Receive, Scope, Send

from pdkv.router.http.server import protocol as limits
from pdkv.router.http.server.response_transport import ResponseTransport

event_loop = uvloop.new_event_loop  # the router's kind

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"


class _Connection(asyncio.Transport):
    """Notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.gone = False

    def is_closing(self) -> bool:
        return self.gone

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


def make() -> tuple[_Connection, ResponseTransport, list[bool]]:
    connection, closed = _Connection(), []
    return connection, ResponseTransport(connection, lambda: closed.append(True)), closed


def test_head_and_body_are_one_write_and_more_is_written_at_once() -> None:
    async def main() -> list[bytes]:
        connection, transport, _ = make()
        for response in (b"first", b"second"):
            transport.begin_response()
            transport.write(HEAD)
            transport.write(response)
            transport.write(b"more")
        await asyncio.sleep(0)
        return connection.written

    assert run(main()) == [HEAD + b"first", b"more", HEAD + b"second", b"more"]


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    connection, transport, _ = make()
    transport.begin_response()
    transport.write(HEAD)
    assert connection.written == []
    await asyncio.sleep(0)
    assert connection.written == [HEAD]
    transport.write(b"body")
    assert connection.written == [HEAD, b"body"]


def test_who_waits_to_send_a_body_is_answered_at_once() -> None:
    async def main() -> list[bytes]:
        connection, transport, _ = make()
        transport.begin_response()
        transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert connection.written == [b"HTTP/1.1 100 Continue\r\n\r\n"]
        transport.write(HEAD)
        transport.write(b"body")
        return connection.written[1:]

    assert run(main()) == [HEAD + b"body"]


async def test_a_head_without_a_body_is_out_before_the_end() -> None:
    connection, transport, closed = make()
    transport.begin_response()
    transport.write(HEAD)
    transport.close()
    assert (connection.written, closed) == ([HEAD], [True])
    transport.write(b"late")
    await asyncio.sleep(0)
    assert connection.written == [HEAD]


async def test_nothing_is_written_to_a_connection_that_is_gone() -> None:
    connection, transport, _ = make()
    transport.begin_response()
    transport.write(HEAD)
    connection.gone = True
    await asyncio.sleep(0)
    assert connection.written == []


class _Recorded:
    """A real connection whose writes are noted."""

    def __init__(self, connection: asyncio.Transport, writes: list[bytes]) -> None:
        self._connection = connection
        self._writes = writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._connection.write(data)


async def test_a_reply_of_the_server_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[bytes] = []

    class Recording(ResponseTransport):
        def __init__(self, connection: asyncio.Transport, on_close: Callable[[], None]) -> None:
            super().__init__(cast(asyncio.Transport, _Recorded(connection, writes)), on_close)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"done"})

    monkeypatch.setattr(limits, "ResponseTransport", Recording)
    async with serving(app) as server, connected(server.port) as client:
        for _ in range(3):
            await client.send(get("/"))
            assert (await client.reply()).body == b"done"
    assert len(writes) == 3
    assert all(data.startswith(b"HTTP/1.1 200") and data.endswith(b"done") for data in writes)
