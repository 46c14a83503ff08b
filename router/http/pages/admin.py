"""The operators' HTTP application: engines are listed, drained, resumed, given roles, added and removed.

It is served on a unix socket in the launch's private directory: who may connect is who may enter the directory (mode
0700). Where clients need API keys, all but adding and removing is served beside the API, too, to keys with `admin`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pdkv.base.limits import MAX_WAIT_S, clip
from pdkv.base.options import Options, option
from pdkv.errors import ConfigError, InvalidRequest, PdkvError
from pdkv.router.engines.cache_view import describe_caches
from pdkv.router.generations.operations import Operations
from pdkv.router.http.pages.cache_pages import MAX_BODY_BYTES as MAX_CACHE_BODY_BYTES
from pdkv.router.http.pages.cache_pages import POOL, CachePages
from pdkv.router.http.pages.request_state import request_route
from pdkv.router.http.pages.status_pages import freshen
from pdkv.router.http.server.access_log import CLIENT_GONE
from pdkv.router.http.server.auth import RESET_PATH
from pdkv.router.http.server.errors import describe_error, json_response

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

_MOVE_S = 5.0
"""How long it may take until nothing holds on to an engine from which everything was moved."""

_MAX_BODY_BYTES = 64 << 10

_BODY_S = 10.0
"""How long a body may take."""

_Body = TypeVar("_Body")


class _Query(Options):
    """What may stand behind the path."""

    fresh: bool = option(False)
    until: Literal["ready", "drained"] | None = option(None)
    wait_s: Annotated[float, Meta(ge=0, le=MAX_WAIT_S)] = option(0.0)
    pid: Annotated[int, Meta(ge=0, lt=10**10)] | None = option(None)
    move: bool = option(False)
    force: bool = option(False)


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST …/role."""

    role: str


class EngineBody(msgspec.Struct, forbid_unknown_fields=True):
    """PUT of an engine."""

    role: str
    endpoint: str
    refusal: str | None = None  # path of the launcher's note


def admin_routes(dispatcher: "Dispatcher", operations: Operations, caches: CachePages | None = None) -> list[Route]:
    """What an operator may ask for from anywhere, given that somebody has checked that it is one.

    GET  /admin/engines              {"engines": [as in /topology]}
    GET  /admin/engines/NAME         one of them; with ?until=ready|drained when it is so, or after wait_s seconds;
                                     ready&pid=N: that incarnation
    POST /admin/engines/NAME/drain   it gets no new request; with ?wait_s=N the answer comes when it is drained;
                                     move=true: what it has after that time goes on elsewhere
    POST /admin/engines/NAME/resume  it gets requests again
    POST /admin/engines/NAME/role    {"role": "prefill" | "decode" | "any"}
    GET  /admin/cache                what pools and tiers of KV hold and gave (engines/cache_view.py)
    POST /admin/cache/ACTION         lookup, clear, pin, unpin, prefetch, move: of a prompt (cache_pages.py)
    POST /reset_prefix_cache         clear of all engines' pools
    GET  /admin/requests/ID          what is known of the requests of that id (request_state.py)

    With ?fresh=true the engines are asked first, and what they said before is told only of those that do not answer.
    Every other answer is the engine. What would leave nobody for a role is 409, unless ?force=true. `caches` None: no
    actions on them.
    """

    async def list_engines(request: Request) -> Response:
        await freshen(request, dispatcher)
        return json_response(dispatcher.topology())

    async def show_cache(request: Request) -> Response:
        await freshen(request, dispatcher)
        return json_response(describe_caches(dispatcher.engines()) if caches is None else caches.describe())

    async def get_engine(request: Request) -> Response:
        name, query = request.path_params["name"], _query(request)
        operations.describe(name)
        if query.until is not None:
            await operations.wait(name, query.until, query.wait_s, query.pid)
        return json_response(operations.describe(name))

    async def drain(request: Request) -> Response:
        name, query = request.path_params["name"], _query(request)
        operations.drain(name, force=query.force)
        if not await operations.wait(name, "drained", query.wait_s) and query.move:
            operations.move_away(name)
            await operations.wait(name, "drained", _MOVE_S)
        return json_response(operations.describe(name))

    async def resume(request: Request) -> Response:
        name = request.path_params["name"]
        operations.resume(name)
        return json_response(operations.describe(name))

    async def set_role(request: Request) -> Response:
        name, body = request.path_params["name"], await _body(request, RoleBody)
        operations.set_role(name, body.role, force=_query(request).force)
        return json_response(operations.describe(name))

    async def order_cache(request: Request) -> Response:
        assert caches is not None
        data = await _read(request, MAX_CACHE_BODY_BYTES)
        return json_response(await caches.answer(request.path_params["action"], data))

    async def reset_prefix_cache(request: Request) -> Response:
        assert caches is not None
        return json_response(await caches.answer("clear", b'{"tier": "%s"}' % POOL.encode()))

    path = "/admin/engines/{name}"
    return [
        Route("/admin/engines", list_engines),
        Route("/admin/cache", show_cache),
        *([Route("/admin/cache/{action}", _checked(order_cache), methods=["POST"])] if caches is not None else ()),
        Route(path, _checked(get_engine), methods=["GET"]),
        Route(path + "/drain", _checked(drain), methods=["POST"]),
        Route(path + "/resume", _checked(resume), methods=["POST"]),
        Route(path + "/role", _checked(set_role), methods=["POST"]),
        request_route(dispatcher),
        *([Route(RESET_PATH, _checked(reset_prefix_cache), methods=["POST"])] if caches is not None else ()),
    ]


def create_admin_app(
    dispatcher: "Dispatcher",
    operations: Operations,
    caches: CachePages | None = None,
    figures: Callable[[], dict[str, float]] = dict,
) -> Starlette:
    """The ASGI application for the private directory: `admin_routes`, and what only this host's user may do.

    GET  /admin/figures              `figures()`: metrics without labels, by name (`pd status`)
    PUT  /admin/engines/NAME         {"role", "endpoint", "refusal"}: the launcher has started one more
    DELETE /admin/engines/NAME       the launcher is about to end it
    """

    async def add(request: Request) -> Response:
        name, body = request.path_params["name"], await _body(request, EngineBody)
        operations.add(name, body.role, body.endpoint, Path(body.refusal) if body.refusal is not None else None)
        return json_response(operations.describe(name))

    async def remove(request: Request) -> Response:
        operations.remove(request.path_params["name"], force=_query(request).force)
        return json_response({"removed": request.path_params["name"]})

    async def show_figures(request: Request) -> Response:
        return json_response(figures())

    path = "/admin/engines/{name}"
    own = [Route(path, _checked(add), methods=["PUT"]), Route(path, _checked(remove), methods=["DELETE"])]
    own.append(Route("/admin/figures", show_figures))
    return Starlette(routes=[*admin_routes(dispatcher, operations, caches), *own])


def _checked(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def checked(request: Request) -> Response:
        try:
            return await endpoint(request)
        except PdkvError as error:
            status, body = describe_error(error)
            return json_response(body, status=status)
        except ClientDisconnect:  # nobody reads this: it is for the access line
            return Response(status_code=CLIENT_GONE)

    return checked


def _query(request: Request) -> _Query:
    try:
        return _Query.parse({name: clip(text) for name, text in request.query_params.items()})
    except ConfigError as error:
        name = next((name for name in request.query_params if name in str(error)), None)
        raise InvalidRequest(str(error), param=name) from None


async def _body(request: Request, kind: type[_Body]) -> _Body:
    data = await _read(request, _MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is no {kind.__name__}: {error}") from None


async def _read(request: Request, most: int) -> bytearray:
    data = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise InvalidRequest(f"the body must have at most {most} bytes", status=413)
    except TimeoutError:
        raise InvalidRequest(f"the body did not arrive within {_BODY_S:g} s", status=408) from None
    return data
