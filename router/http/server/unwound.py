"""ASGI: long answers outside of the layers that let their requests in.

Middleware, routes and exception handlers have done their part when they have passed a request on, but each of them is a
coroutine that would be resumed for every token of a stream, and kept for as long as it lasts. So an endpoint that is
`Deferred` only leaves its work behind, the layers return, and `Unwound`, which stands around all of them, does it.
"""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdkv.router.http.server.access_log import leave_line_to_endpoint

_PLACE = "pdkv.unwound"


class _LayeredSend:
    """A `send` through all layers, which knows the one behind them."""

    __slots__ = ("_send", "begun", "server_send")

    def __init__(self, send: Send, server_send: Send) -> None:
        self._send = send
        self.server_send = server_send
        self.begun = False

    def __call__(self, message: Message) -> Awaitable[None]:
        self.begun = True
        return self._send(message)


def body_send(send: Send) -> Send:
    """What sends bodies, which no layer looks at: past all layers, where that is possible, else `send` itself."""
    return send.server_send if isinstance(send, _LayeredSend) else send


class _Place:
    """What an endpoint finds in its scope where `Unwound` stands around it."""

    __slots__ = ("send", "work")

    def __init__(self, send: Send) -> None:
        self.send = send
        self.work: tuple[ASGIApp, _LayeredSend] | None = None


class Deferred:
    """Around an endpoint that writes its own access line: it runs when the layers around it have returned.

    What it sends by the `send` that it is given passes them all the same.
    """

    def __init__(self, endpoint: ASGIApp) -> None:
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place: _Place | None = scope.get(_PLACE)
        if place is None:
            await self._endpoint(scope, receive, send)
        else:
            leave_line_to_endpoint(scope)
            place.work = self._endpoint, _LayeredSend(send, place.send)


class Unwound:
    """Around an application: does the work that its `Deferred` endpoints leave behind."""

    def __init__(self, app: ASGIApp, on_error: Callable[[Request, Exception], Awaitable[Response]]) -> None:
        """`on_error`: what to answer after a defect; the error goes on to the server."""
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        place = scope[_PLACE] = _Place(send)
        try:
            await self._app(scope, receive, send)
        finally:
            del scope[_PLACE]  # its `send` knows the scope: only the collector would find the two
        if place.work is None:
            return
        endpoint, layered = place.work
        try:
            await endpoint(scope, receive, layered)
        except Exception as error:
            if not layered.begun:
                response = await self._on_error(Request(scope), error)
                await response(scope, receive, send)
            raise
