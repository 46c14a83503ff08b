"""What all pages have in common: FastAPI reads their parameters, and all errors have OpenAI's format."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, params
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BeforeValidator, Strict
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest, PdkvError
from pdkv.router.http.server.access_log import CLIENT_GONE
from pdkv.router.http.server.auth import RESET_PATH
from pdkv.router.http.server.errors import describe_error, error_body, json_response
from pdkv.router.http.server.request_body import read_coding

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

_WORDS = {"true": True, "1": True, "false": False, "0": False}
Flag = Annotated[bool, Strict(), BeforeValidator(lambda word: _WORDS.get(word, word))]
"""true or false; yes and the like are neither, as everywhere else."""

MAX_BODY_BYTES = 64 << 10

BODY_S = 10.0
"""How long a body may take."""

ERROR = {"schema": {"$ref": "#/components/schemas/ErrorReply"}}
MAY_NEED_KEY = [{"key": []}, dict[str, Any]()]  # a server without keys asks for none
_REFUSED = {"description": "a parameter is wrong, or it cannot be done", "content": {"application/json": ERROR}}


class Page(APIRoute):
    """One path: `endpoint` has typed parameters, and returns a Response or a model."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        described: dict[str, Any] = {"responses": {"4XX": _REFUSED}, "openapi_extra": {"security": MAY_NEED_KEY}}
        super().__init__(path, endpoint, **described, **options)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, for a request with its body already read."""
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            body = await read_body(request, MAX_BODY_BYTES)
            request = Request({**request.scope, "headers": [(b"content-type", b"application/json")]}, request.receive)
            request._body = body
            return await handle(request)

        return handle if self.body_field is None else bounded


class HeadAsGet:
    """ASGI middleware: HEAD is handled as GET; the server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


def freshened(dispatcher: "Dispatcher") -> list[params.Depends]:
    """Dependencies of a page with ?fresh=true: the engines are first asked for reports, and those that answer in time
    are included.
    """

    async def freshen(fresh: Flag = False) -> None:
        if fresh:
            await asyncio.gather(*(each.listener.fresh_reports() for each in dispatcher.pools))

    return [Depends(freshen)]


async def read_body(request: Request, most: int) -> bytes:
    """A page's body of at most so many bytes. Raises InvalidRequest (408, 413, 415) and ClientDisconnect."""
    read_coding(request.headers)
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise InvalidRequest(f"the body must have at most {most} bytes", status=413)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {BODY_S:g} s", status=408) from None
    return bytes(data)


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, PdkvError)
    status, body = describe_error(error)
    return json_response(body, status)


async def _invalid(request: Request, error: Exception) -> Response:
    """A parameter of a wrong kind or out of its range: the first one."""
    assert isinstance(error, RequestValidationError)
    wrong = error.errors()[0]
    name = ".".join(str(part) for part in wrong["loc"][1:] if wrong["type"] != "json_invalid") or "the body"
    got = "" if wrong["type"] == "missing" else f", got {clip(repr(wrong['input']))}"
    message = f"{name}: {wrong['msg']}{got}"
    return json_response(error_body(message, status=400, param=name), status=400)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)  # nobody reads this: it is for the access line


_TEXT_ALONE = "this server has completions, chat, responses, embeddings and rankings of text only"
_OTHERS = (
    "/embeddings /score /v1/score /v2/rerank /pooling /classify /v1/audio/ /v1/images/ /v1/moderations /v1/realtime"
)
_NOT_HERE = {
    **dict.fromkeys(_OTHERS.split(), _TEXT_ALONE),
    "/v1/messages": f"{_TEXT_ALONE} by OpenAI's API, not by Anthropic's",
    "/v1/load_lora_adapter": "this server serves one model, without adapters",
    "/v1/unload_lora_adapter": "this server serves one model, without adapters",
    RESET_PATH: "it takes a server with API keys (--api-key-file) and an admin's; without, see `pd cache clear`",
}
"""What other servers have, and why it is not there."""


async def _http_error(request: Request, error: Exception) -> Response:
    """404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    message = f"{request.method} {clip(path)}: {error.detail}"  # its url trusts the Host header
    if error.status_code == 404:
        message += next((f": {why}" for start, why in _NOT_HERE.items() if path.startswith(start)), "")
    return json_response(error_body(message, status=error.status_code), error.status_code, error.headers)


async def internal_error(request: Request, error: Exception) -> Response:
    """A defect of the router; the server logs the exception itself."""
    return json_response(error_body("internal error", status=500, code="internal_error"), status=500)


ERROR_HANDLERS: dict[Any, Callable[[Request, Exception], Coroutine[Any, Any, Response]]] = {
    PdkvError: _refusal,
    RequestValidationError: _invalid,
    ClientDisconnect: _left,
    HTTPException: _http_error,
    Exception: internal_error,
}
"""Handlers of an application with pages."""
