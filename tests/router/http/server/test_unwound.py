"""Answers outside of the layers that let their requests in."""

import asyncio
import gc
import weakref
from collections.abc import Awaitable

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdkv.router.http.server.unwound import Deferred, Unwound, body_send


class Layer:
    """What stands around an endpoint; writes down what passes it, and when it has returned."""

    def __init__(self, app: ASGIApp, log: list[str]) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        def watched(message: Message) -> Awaitable[None]:
            self._log.append(f"layer: {message['type']}")
            return send(message)

        await self._app(scope, receive, watched)
        self._log.append("layer: returned")


class Endpoint:
    """Answers in two parts, or fails before or between them."""

    def __init__(self, log: list[str], fail_at: int = -1) -> None:
        self._log = log
        self._fail_at = fail_at

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._log.append("endpoint")
        if self._fail_at == 0:
            raise KeyError("a defect")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if self._fail_at == 1:
            raise KeyError("a defect")
        await body_send(send)({"type": "http.response.body", "body": b"all of it"})


class Server:
    """What the application sends."""

    def __init__(self) -> None:
        self.sent: list[Message] = []

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    async def receive(self) -> Message:
        raise AssertionError("nobody receives")


async def on_error(request: Request, error: Exception) -> Response:
    return PlainTextResponse(f"{request.url.path}: {error!r}", status_code=500)


def serve(app: ASGIApp) -> Server:
    server = Server()
    scope = {"type": "http", "method": "POST", "path": "/p", "headers": [], "query_string": b"", "server": ("h", 1)}
    asyncio.run(app(scope, server.receive, server.send))  # type: ignore[arg-type]
    return server


def test_an_endpoint_runs_when_the_layers_have_returned_and_only_the_head_passes_them() -> None:
    log: list[str] = []
    server = serve(Unwound(Layer(Deferred(Endpoint(log)), log), on_error))
    assert log == ["layer: returned", "endpoint", "layer: http.response.start"]
    assert [message["type"] for message in server.sent] == ["http.response.start", "http.response.body"]


def test_an_endpoint_runs_within_its_layers_where_nobody_stands_around_them() -> None:
    log: list[str] = []
    server = serve(Layer(Deferred(Endpoint(log)), log))
    assert log == ["endpoint", "layer: http.response.start", "layer: http.response.body", "layer: returned"]
    assert server.sent[-1]["body"] == b"all of it"


@pytest.mark.parametrize("fail_at", [0, 1])
def test_a_defect_is_answered_where_nothing_was_and_goes_on_to_the_server(fail_at: int) -> None:
    log: list[str] = []
    servers: list[Server] = []

    async def remember(scope: Scope, receive: Receive, send: Send) -> None:
        servers.append(receive.__self__)  # type: ignore[attr-defined]
        await Unwound(Layer(Deferred(Endpoint(log, fail_at)), log), on_error)(scope, receive, send)

    with pytest.raises(KeyError, match="a defect"):
        serve(remember)
    [server] = servers
    statuses = [message["status"] for message in server.sent if message["type"] == "http.response.start"]
    assert statuses == ([500] if fail_at == 0 else [200])
    if fail_at == 0:
        assert server.sent[-1]["body"] == b"/p: KeyError('a defect')"


def test_what_is_not_http_and_endpoints_that_are_not_deferred_pass() -> None:
    log: list[str] = []
    assert serve(Unwound(Layer(Endpoint(log), log), on_error)).sent[-1]["body"] == b"all of it"
    assert log[0] == "endpoint"
    assert log[-1] == "layer: returned"

    async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
        log.append(scope["type"])

    asyncio.run(Unwound(lifespan, on_error)({"type": "lifespan"}, Server().receive, Server().send))
    assert log[-1] == "lifespan"


def test_a_request_leaves_nothing_for_the_collector() -> None:
    class Cycle(Server):
        """Knows its scope, as the server's does."""

        scope: Scope

    gone: list[weakref.ref[Cycle]] = []
    app = Unwound(Deferred(Endpoint([])), on_error)

    async def one() -> None:
        server = Cycle()
        server.scope = {"type": "http"}
        gone.append(weakref.ref(server))
        await app(server.scope, server.receive, server.send)

    gc.disable()
    try:
        asyncio.run(one())
        assert gone[0]() is None
    finally:
        gc.enable()
