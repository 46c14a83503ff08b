"""What a connection may cost: headers, URLs, time, connections, and what comes unasked. Errors in OpenAI's shape."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import cast
from unittest import mock

import pytest
import uvicorn
from coroutines import clock, run
from fake_dispatcher import FakeDispatcher, say, tokens
from http_server import Client, Reply, Serving, connected, get, post, serving
from small_app import MODEL, ids, make_app
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from pdkv.config import HttpLimits
from pdkv.errors import ConfigError, EngineDied
from pdkv.router.admission.admission_queue import Admission
from pdkv.router.generations.dispatch import Dispatcher
from pdkv.router.http.server import connections as http_connections
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.connections import connection_limit
from pdkv.router.http.server.drain import Drain
from pdkv.router.http.server.protocol import LimitedProtocol, _Phase
from pdkv.router.http.server.request_size import RequestSize
from pdkv.router.process import HttpServer, Stopping
from pdkv.testing import VirtualUvloop

event_loop = VirtualUvloop

COMPLETIONS = "/v1/completions"
MAX_HEADERS = HttpLimits().max_headers
PROMPT = b'{"model": "%s", "prompt": "x"}' % MODEL.encode()


def exchange(request: bytes, *, late: bool = False) -> Reply:
    """What is answered to `request`, of which nothing more comes in time if it is `late`; then the connection must end,
    without a reset.
    """

    async def main() -> Reply:
        async with serving(make_app(FakeDispatcher(say(ids("ab"))))) as server:
            async with connected(server.port) as client:
                await client.send(request)
                if late:
                    await begun(server.state)
                    reply = await clock().passing(client.reply())
                else:
                    reply = await client.reply()
                assert reply.headers["connection"] == "close"
                assert await client.at_end()
            async with connected(server.port) as client:
                await client.send(get("/health"))
                assert (await client.reply()).status == 200
                return reply

    return run(main(), event_loop)


async def begun(state: ServerState) -> None:
    """Until the server has read the beginning of a request on its only connection."""
    while not any(connection._phase is not _Phase.IDLE for connection in state.connections):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("/health", "x: " + "y" * 40_000),
        b"GET /health HTTP/1.1\r\nx: " + b"y" * 200_000,
        get("/health", *(f"x{i}: y" for i in range(101))),
        get("/health", *(f"x{i}: {'y' * 1000}" for i in range(50))),
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: "
        + b"y" * 40_000
        + b"\r\n\r\n",
    ],
    ids=["long", "endless", "many", "large together", "trailers"],
)
def test_headers_that_are_too_large_are_431(request_bytes: bytes) -> None:
    reply = exchange(request_bytes)
    assert reply.status == 431
    assert reply.error()["type"] == "invalid_request_error"
    assert "--max-header-bytes" in reply.error()["message"]


@pytest.mark.parametrize(
    "url", [b"/" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", b"/" + b"a" * 500_000], ids=["long", "endless"]
)
def test_a_url_that_is_too_long_is_414(url: bytes) -> None:
    reply = exchange(b"GET " + url)
    assert (reply.status, reply.error()["code"]) == (414, None)
    assert "8192" in reply.error()["message"]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 20_000,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["nonsense", "tls", "header", "length", "chunk", "tiny chunks", "h2"],
)
def test_what_the_parser_refuses_is_400_in_openais_shape(request_bytes: bytes) -> None:
    reply = exchange(request_bytes)
    assert reply.status == 400
    assert reply.error()["type"] == "invalid_request_error"
    assert reply.headers["content-type"] == "application/json"


def test_a_large_body_gets_its_413_and_no_reset() -> None:
    """The client sends everything before it reads anything, as many do."""
    body = bytes(24 << 20)
    reply = exchange(post(COMPLETIONS, body, "content-type: application/json"))
    assert reply.status == 413
    assert "--max-body-bytes" in reply.error()["message"]


def test_a_chunked_body_that_is_too_large_gets_its_413_and_no_reset() -> None:
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert exchange(head + chunk * 24 + b"0\r\n\r\n").status == 413


@pytest.mark.parametrize("length", [100_000, 100], ids=["too long", "too late"])
async def test_a_body_that_nobody_asked_for_does_not_keep_the_connection(length: int) -> None:
    limits = HttpLimits(max_body_bytes=50_000)
    async with serving(make_app(FakeDispatcher()), limits) as server, connected(server.port) as client:
        await client.send(f"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\nx".encode())
        assert (await client.reply()).status == 404
        assert await (client.at_end() if length == 100_000 else clock().passing(client.at_end()))


@pytest.mark.parametrize("size", [100, 200_000])
@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("POST", "/v1/models", 405)])
async def test_a_body_that_comes_behind_its_answer_takes_no_later_request_along(
    method: str, path: str, status: int, size: int
) -> None:
    """F35. Answered before it is read; the connection, which was promised to be kept, has its idle time then."""
    async with serving(make_app(FakeDispatcher())) as server, connected(server.port) as client:
        for framing in (f"content-length: {size}", "transfer-encoding: chunked"):
            await client.send(f"{method} {path} HTTP/1.1\r\nhost: test\r\n{framing}\r\n\r\n".encode())
            reply = await client.reply()
            assert (reply.status, reply.headers.get("connection")) == (status, None)
            await client.send(b"x" * size if "length" in framing else b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size))
            await client.send(get("/version"))
            assert (await client.reply()).status == 200
        [connection] = server.state.connections
        assert connection._header_timer is None


UPGRADE = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA"
"""What clients offer that would rather speak HTTP/2, as those on the JDK's own client do."""

CHUNKED = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n{UPGRADE}\r\n\r\n".encode()


@pytest.mark.parametrize("size", [1, 100, 100_000], ids=lambda size: f"{size} bytes at once")
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
async def test_a_request_that_offers_another_protocol_is_served_as_if_it_did_not(size: int, chunked: bool) -> None:
    request = post(COMPLETIONS, PROMPT, "content-type: application/json", UPGRADE)
    if chunked:
        half = len(PROMPT) // 2
        parts = [b"%x\r\n%s\r\n" % (len(part), part) for part in (PROMPT[:half], PROMPT[half:], b"")]
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        head += "content-type: application/json\r\n"
        request = b"".join([head.encode(), UPGRADE.encode(), b"\r\n\r\n", *parts])
    async with serving(make_app(FakeDispatcher(say(ids("ab"))))) as server, connected(server.port) as client:
        for start in range(0, len(request), size):
            await client.send(request[start : start + size])
            await asyncio.sleep(0)
        await client.send(b"PRI * HTTP/2.0\r\n\r\n")  # no request of this protocol
        reply = await client.reply()
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert await client.at_end()


@pytest.mark.parametrize(
    "behind",
    [post(COMPLETIONS, PROMPT, "content-type: application/json"), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(100)],
    ids=["a request", "the other protocol", "garbage"],
)
def test_what_comes_behind_a_body_with_such_an_offer_is_no_part_of_it(behind: bytes) -> None:
    assert exchange(post(COMPLETIONS, PROMPT, "content-type: application/json", UPGRADE) + behind).status == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/health", UPGRADE), 200),
        (post(COMPLETIONS, b"", UPGRADE), 400),
        (post(COMPLETIONS, bytes(24 << 20), "content-type: application/json", UPGRADE), 413),
        (post(COMPLETIONS, PROMPT, "x: " + "y" * 40_000, UPGRADE), 431),
        (CHUNKED + b"no size", 400),
        (CHUNKED + b"0\r\nx: " + b"y" * 40_000 + b"\r\n\r\n", 431),
        (CHUNKED + b"0\r\n" + b"x: y\r\n" * 200 + b"\r\n", 431),
        (get("/health", *(f"x{i}: y" for i in range(MAX_HEADERS - 4)), UPGRADE), 200),
        (post("/nowhere", b"{}", *(f"x{i}: y" for i in range(MAX_HEADERS - 5)), UPGRADE), 404),
        (post("/nowhere", b"{}", *(f"x{i}: y" for i in range(MAX_HEADERS - 4)), UPGRADE), 431),
    ],
    ids=[
        "no body",
        "empty body",
        "large body",
        "large headers",
        "broken chunks",
        "long trailer",
        "many trailers",
        "most headers",
        "most headers and a body",
        "one too many",
    ],
)
def test_an_offer_of_another_protocol_changes_no_limit(request_bytes: bytes, status: int) -> None:
    assert exchange(request_bytes).status == status


@pytest.mark.parametrize("target", ["CONNECT evil:80", "GET http://host", "GET http://host?x=1", "GET http://"])
@pytest.mark.parametrize("offer", ["", UPGRADE + "\r\n"], ids=["plain", "offer"])
def test_a_url_that_is_none_is_said_to_be_the_reason(target: str, offer: str, caplog: pytest.LogCaptureFixture) -> None:
    reply = exchange(f"{target} HTTP/1.1\r\nhost: x\r\n{offer}\r\n".encode())
    assert "Traceback" not in caplog.text
    assert (reply.status, "URL" in reply.error()["message"]) == (400, True)


@pytest.mark.parametrize(
    ("place", "request_bytes"),
    [("add_url", get("/health")), ("add_body", post(COMPLETIONS, PROMPT, UPGRADE))],
    ids=["url", "body behind an offer"],
)
def test_a_defect_while_a_request_is_received_is_not_the_clients(
    place: str, request_bytes: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RequestSize, place, lambda self, size: 1 // 0)

    async def main() -> Reply:
        async with serving(make_app(FakeDispatcher())) as server, connected(server.port) as client:
            await client.send(request_bytes)
            return await client.reply()

    reply = run(main(), event_loop)
    assert (reply.status, reply.error()["code"]) == (500, "internal_error")
    assert "ZeroDivisionError" in caplog.text


def test_headers_that_do_not_come_are_408() -> None:
    reply = exchange(b"GET /health HTTP/1.1\r\nx: ", late=True)
    assert reply.status == 408
    assert "--header-timeout-s" in reply.error()["message"]


async def test_headers_of_a_later_request_are_timed_too() -> None:
    async with serving(make_app(FakeDispatcher())) as server, connected(server.port) as client:
        await client.send(get("/health") + b"GET /hea")
        assert (await client.reply()).status == 200
        await begun(server.state)
        assert (await clock().passing(client.reply())).status == 408
        assert await client.at_end()


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "empty lines"])
async def test_a_connection_without_a_request_is_closed(sent: bytes) -> None:
    async with serving(make_app(FakeDispatcher())) as server, connected(server.port) as client:
        await client.send(sent)
        assert b"200" not in await clock().passing(client.reader.read())


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    async with serving(make_app(FakeDispatcher())) as server, connected(server.port) as client:
        await client.send(get("/health"))
        assert (await client.reply()).status == 200
        assert await clock().passing(client.at_end())


def test_a_body_that_does_not_come_is_408() -> None:
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{"
    reply = exchange(request, late=True)
    assert reply.status == 408
    assert "--body-timeout-s" in reply.error()["message"]


async def test_thousands_of_pipelined_requests_are_answered_in_order() -> None:
    async with serving(make_app(FakeDispatcher(say(ids("ab"))))) as server, connected(server.port) as client:
        whole = b"".join(get(f"/v1/models/{i}") + post(COMPLETIONS, PROMPT) for i in range(1500))
        sending = asyncio.ensure_future(client.send(whole))
        for i in range(1500):
            assert f"'{i}'" in (await client.reply()).error()["message"]
            assert (await client.reply()).status == 200
        await sending


def test_garbage_behind_a_stream_leaves_the_stream_whole(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> bytes:
        dispatcher = FakeDispatcher()
        async with serving(make_app(dispatcher)) as server, connected(server.port) as client:
            body = PROMPT[:-1] + b', "stream": true}'
            await client.send(post(COMPLETIONS, body))
            generation = await dispatcher.next_generation(0)
            generation.put(tokens(*ids("a")))
            assert b"200 OK" in await client.reader.readuntil(b"\r\n\r\n")
            await client.send(b"garbage\r\n\r\n" * 10)
            await refused_by(server.state)
            generation.put(tokens(*ids("b"), end="stop"))
            return await client.reader.read()

    caplog.set_level(logging.WARNING)
    rest = run(main(), event_loop)
    assert b'"text":"b"' in rest
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"HTTP/1.1" not in rest
    assert not caplog.records


async def refused_by(state: ServerState) -> None:
    """Until the server's only connection has refused what came behind its request."""
    [connection] = state.connections
    while not connection._deaf:
        await asyncio.sleep(0)


async def test_writing_behind_the_end_of_a_connection_leaves_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """A pipelined request is refused while the first is served; its client has closed."""
    caplog.set_level(logging.WARNING)
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server, connected(server.port) as client:
        await client.send(post(COMPLETIONS, PROMPT, "connection: close") + get("/health") * 3)
        generation = await dispatcher.next_generation(0)
        [connection] = server.state.connections
        connection.transport.close()
        generation.put(tokens(*ids("ab"), end="stop"))
        assert await client.at_end()
    assert not caplog.records


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers when the client has gone."""
    if scope["type"] == "http":
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.mark.parametrize("size", [64 << 20, 4 << 20], ids=["the server waits to write", "all is written"])
@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
async def test_a_client_that_does_not_read_does_not_keep_its_connection(size: int, header: str) -> None:
    """It asks for more than the sockets hold: the connection, and what the application waits for, end all the same."""

    async def large_app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(0, size, 4 << 20):
            await send({"type": "http.response.body", "body": bytes(4 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async with serving(large_app) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(get("/", header))
            await served(server.state, 1)
            await clock().passing(ends(server.state))


async def ends(state: ServerState) -> None:
    """Until no connection is left, and nothing that was asked."""
    while state.connections or state.tasks:
        await asyncio.sleep(0)


async def test_the_generation_of_a_client_that_does_not_read_ends_with_its_connection() -> None:
    """However much is still to come: nobody waits for it."""
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", server.port))
            body = b'{"model": "%s", "prompt": "x", "stream": true}' % MODEL.encode()
            client.sendall(post(COMPLETIONS, body))
            generation = await dispatcher.next_generation(0)
            delta = tokens(*ids("\x01" * 50_000))  # 300 kB of JSON
            while not generation.aborted:
                if generation.num_unread < 2:
                    generation.put(delta)
                clock().advance(1.0)
                await asyncio.sleep(0)
            await ends(server.state)


async def has_read_some(connection: LimitedProtocol, read: Callable[[], Awaitable[bytes]]) -> int:
    """Read until the server could write more, if there is more; return how much was read."""
    before, size = connection.num_unsent, 0
    while before and connection.num_unsent >= before:
        size += len(await read())
    return size


@pytest.mark.parametrize("may_be_slow", [False, True])
async def test_a_client_that_reads_too_slowly_is_dropped(may_be_slow: bool) -> None:
    """F33. It never reads nothing for as long as it may, but far less than --min-send-rate, or slowly enough."""
    limits = HttpLimits() if may_be_slow else HttpLimits(min_send_rate=1 << 30)
    async with unread(get("/", "connection: close"), limits=limits) as (server, client):
        [connection], size = server.state.connections, 0
        with contextlib.suppress(ConnectionError):
            for _ in range(12):
                size += await has_read_some(connection, lambda: client.reader.read(1 << 16))
                clock().advance(0.9 * limits.send_timeout_s)
            size += len(await client.reader.read())
        assert (size > len(LARGE)) == may_be_slow


@pytest.mark.parametrize("behind", [get("/version"), get("/version") * 3000, b"GET /version HTTP/1.1\r\nx: "])
async def test_a_client_that_sends_ahead_and_leaves_is_noticed(behind: bytes) -> None:
    """F34. Nothing is read behind a request under way, so its end is not, either."""
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server:
        async with connected(server.port) as client:
            await client.send(post(COMPLETIONS, PROMPT))
            generation = await dispatcher.next_generation(0)
            await client.send(behind)
            while not next(iter(server.state.connections)).flow.read_paused and len(behind) > 30:
                await asyncio.sleep(0)
        await clock().passing(generation.over.wait())
        assert generation.aborted


async def test_too_many_connections_are_told_so() -> None:
    async with (
        serving(slow_app, max_connections=2) as server,
        connected(server.port) as one,
        connected(server.port) as two,
    ):
        for client in (one, two):
            await client.send(get("/"))
        await served(server.state, 2)
        async with connected(server.port) as third:
            await third.send(get("/health"))
            reply = await third.reply()
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            assert reply.error()["code"] == "server_busy"
            assert await third.at_end()


async def served(state: ServerState, number: int) -> None:
    """Until so many requests are with the application."""
    while len(state.tasks) < number:
        await asyncio.sleep(0)


async def test_an_idle_connection_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "_EVICTABLE_S", 0.0)
    async with serving(make_app(FakeDispatcher()), max_connections=10) as server:
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(40)]
        async with connected(server.port) as client:
            await client.send(get("/health"))
            assert (await client.reply()).status == 200
        for _, writer in idle:
            writer.close()


async def test_a_body_that_does_not_come_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow senders hold all connections: the oldest one goes. What is being served never does."""
    monkeypatch.setattr(http_connections, "_SLOW_BODY_S", 0.0)
    half = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b" " * 40
    dispatcher, bodies = FakeDispatcher(), ByteBudget(64 << 20, "bytes")
    app = make_app(dispatcher, bodies=bodies)
    async with (
        serving(app, bodies=bodies, max_connections=3) as server,
        connected(server.port) as served_one,
        connected(server.port) as oldest,
        connected(server.port) as other,
    ):
        await served_one.send(post(COMPLETIONS, PROMPT))
        generation = await dispatcher.next_generation(0)
        for number, slow in enumerate((oldest, other), 1):
            await slow.send(half)
            while bodies.held < 40 * number:
                await asyncio.sleep(0)
        async with connected(server.port) as client:
            await client.send(get("/health"))
            assert (await client.reply()).status == 200
        assert await oldest.at_end()
        await other.send(PROMPT.ljust(60))
        (await dispatcher.next_generation(1)).put(tokens(*ids("ab"), end="stop"))
        assert (await other.reply()).status == 200
        generation.put(tokens(*ids("ab"), end="stop"))
        assert (await served_one.reply()).status == 200


async def test_what_is_served_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections, "_SLOW_BODY_S", 0.0)
    await test_too_many_connections_are_told_so()


LARGE = bytes(16 << 20)
"""More than the kernel takes of a client that does not read."""


@contextlib.asynccontextmanager
async def unread(
    request: bytes, drain: Drain | None = None, limits: HttpLimits | None = None
) -> AsyncIterator[tuple[Serving, Client]]:
    """A server that has written a large answer to a client that has not read it."""
    written = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % len(LARGE))]
        with drain.counted() if drain else contextlib.nullcontext():
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": LARGE})
            written.set()

    async with serving(app, limits) as server, connected(server.port) as client:
        await client.send(request)
        await written.wait()
        yield server, client


WAYS = pytest.mark.parametrize(
    "request_bytes",
    [get("/"), get("/", "connection: close"), b"GET / HTTP/1.0\r\n\r\n"],
    ids=["keep-alive", "close", "HTTP/1.0"],
)


@WAYS
async def test_a_stop_does_not_cut_an_answer_that_is_still_read(request_bytes: bytes) -> None:
    async with unread(request_bytes) as (server, client):
        for connection in list(server.state.connections):
            connection.shutdown()
        assert len((await client.reply()).body) == len(LARGE)
        assert await client.at_end()


@WAYS
async def test_a_drain_waits_until_answers_are_read(request_bytes: bytes) -> None:
    """uvicorn would cut the connection a second after it was told to end."""
    drain = Drain(Admission(cast(Dispatcher, FakeDispatcher())))
    async with unread(request_bytes, drain) as (server, client):
        assert await drain.wait_idle(0.0)
        uvicorn_server = HttpServer(uvicorn.Config(make_app(FakeDispatcher())))
        dispatcher = mock.Mock(spec=Dispatcher)
        stopping = Stopping(uvicorn_server, dispatcher.close, drain, server.room, 20.0)
        stopping.on_signal()
        await client.reader.readexactly(1 << 20)
        assert not uvicorn_server.should_exit
        assert not dispatcher.close.called
        assert len(await client.reader.read()) > len(LARGE) - (1 << 20)
        while not uvicorn_server.should_exit:
            await asyncio.sleep(0)


async def test_a_drain_waits_no_longer_than_it_may_for_a_client_that_does_not_read() -> None:
    async with unread(get("/")) as (server, _), connected(server.port) as idle:
        while len(server.state.connections) < 2:
            await asyncio.sleep(0)
        rest = asyncio.create_task(server.room.send_rest(5.0))
        await asyncio.sleep(0)
        clock().advance(5.0)
        assert await rest == 1
        assert await idle.at_end()


def test_there_is_room_for_what_is_no_connection() -> None:
    num_open = len(os.listdir("/proc/self/fd"))  # whatever tests before this one have loaded
    assert connection_limit(100, num_open + 10_000, 4) == 100
    assert 100 < connection_limit(8192, num_open + 256, 4) < 256 - 32
    assert connection_limit(8192, 16, 4) >= 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_headers": 0}, "max_headers"),
        ({"header_timeout_s": float("inf")}, "header_timeout_s"),
        ({"max_body_bytes": 100 << 20}, "max_body_memory"),
        ({"max_url_bytes": 1 << 20}, "max_header_bytes"),
    ],
)
def test_limits_that_cannot_be_are_refused(fields: dict, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        HttpLimits(**fields)


async def test_a_client_has_the_address_that_it_has_and_not_the_one_that_it_says() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((scope["client"][0], scope["scheme"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async with serving(app) as server, connected(server.port) as client:
        await client.send(get("/", f"x-forwarded-for: {'192.0.2.1' * 999}", "x-forwarded-proto: https"))
        assert (await client.reply()).status == 200
    assert seen == [("127.0.0.1", "http")]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", 400),
        (b"HTTP/1.1\r\nhost: a\r\nHost: a\r\n", 400),
        (b"HTTP/1.0\r\nhost: a\r\nhost: b\r\n", 400),
        (b"HTTP/1.1\r\nhost: a/b\r\n", 400),
        (b"HTTP/1.1\r\nhost: a, b c\r\n", 400),
        (b"HTTP/1.1\r\nhost:\r\n", 200),
        (b"HTTP/1.1\r\nhost: [::1]:80\r\n", 200),
        (b"HTTP/1.0\r\n", 200),
    ],
)
def test_a_request_names_its_host_once(head: bytes, status: int) -> None:
    assert exchange(b"GET /health " + head + b"connection: close\r\n\r\n").status == status


STREAM = PROMPT[:-1] + b', "stream": true}'


def test_an_http_1_0_client_gets_no_chunks_and_no_interim_response() -> None:
    async def main() -> bytes:
        async with serving(make_app(FakeDispatcher(say(ids("ab"))))) as server, connected(server.port) as client:
            request = post(COMPLETIONS, STREAM, "connection: keep-alive", "expect: 100-continue")
            await client.send(request.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
            return await client.reader.read()

    head, _, body = run(main(), event_loop).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert body.startswith(b"data: ")
    assert body.endswith(b"}\n\ndata: [DONE]\n\n")


@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
async def test_a_client_that_half_closes_gets_its_answer(body: bytes) -> None:
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server, connected(server.port) as client:
        await client.send(post(COMPLETIONS, body))
        client.writer.write_eof()
        generation = await dispatcher.next_generation(0)
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for _ in range(3):
            clock().advance(1.0)
            await asyncio.sleep(0)
        generation.put(tokens(*ids("ab"), end="stop"))
        reply = await client.reply()
        assert (reply.status, reply.headers["connection"]) == (200, "close")
        assert b"ab" in reply.body
        assert await client.at_end()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_closes_is_told_from_one_that_half_closes(begun: bool) -> None:
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server:
        async with connected(server.port) as client:
            await client.send(post(COMPLETIONS, STREAM if begun else PROMPT))
            generation = await dispatcher.next_generation(0)
            if begun:
                generation.put(tokens(*ids("a")))
                await client.reader.readuntil(b"\n\n\r\n")
        left_at = clock().now()
        await clock().passing(generation.over.wait())
        assert generation.aborted
        assert clock().now() < left_at + 5.0  # before the first ping
        await ends(server.state)


async def test_a_client_that_half_closes_its_stream_gets_a_comment_and_the_rest() -> None:
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server, connected(server.port) as client:
        await client.send(post(COMPLETIONS, STREAM))
        generation = await dispatcher.next_generation(0)
        generation.put(tokens(*ids("a")))
        await client.reader.readuntil(b"\n\n\r\n")
        client.writer.write_eof()
        assert await client.reader.readuntil(b"\n\n\r\n") == b"8\r\n: ping\n\n\r\n"
        generation.put(tokens(*ids("b"), end="stop"))
        assert b"[DONE]" in await client.reader.read()


async def after_ping(client: Client) -> bytes:
    """What comes until a ping, which time brings."""
    return await clock().passing(client.reader.readuntil(b": ping\n\n\r\n"))


@pytest.mark.parametrize("queued", [True, False])
async def test_a_stream_that_waits_begins_and_has_comments(queued: bool) -> None:
    dispatcher = FakeDispatcher()
    dispatcher.num_slots = 1 - queued
    async with serving(make_app(dispatcher)) as server, connected(server.port) as client:
        await client.send(post(COMPLETIONS, STREAM))
        assert b"200 OK" in await after_ping(client)
        assert await after_ping(client) == b"8\r\n: ping\n\n\r\n"
        dispatcher.give_room(1)
        generation = await dispatcher.next_generation(0)
        generation.put(tokens(*ids("a")))
        assert b"HTTP/1.1" not in await client.reader.readuntil(b"\n\n\r\n")
        await after_ping(client)
        generation.put(EngineDied("gone", request_id="r"))
        assert b'"code":"engine_died"' in await client.reader.readuntil(b"0\r\n\r\n")


async def test_a_ping_waits_for_no_client_and_a_whole_answer_has_none() -> None:
    dispatcher = FakeDispatcher()
    async with serving(make_app(dispatcher)) as server, connected(server.port) as client:
        await client.send(post(COMPLETIONS, PROMPT))
        generation = await dispatcher.next_generation(0)
        for _ in range(4):
            clock().advance(20.0)
            await asyncio.sleep(0)
        generation.put(EngineDied("gone", request_id="r"))
        assert (await client.reply()).status == 503
        await client.send(post(COMPLETIONS, STREAM))
        generation = await dispatcher.next_generation(1)
        [connection] = server.state.connections
        connection.pause_writing()
        for _ in range(4):
            clock().advance(20.0)
            await asyncio.sleep(0)
        connection.resume_writing()
        generation.put(tokens(*ids("ab"), end="stop"))
        assert b"ping" not in (await client.reply()).body
