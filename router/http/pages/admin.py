"""The operators' HTTP application: lists, drains, resumes, adds and removes engines, and changes their roles.

It is served on a unix socket in the launch's private directory, so that only users who may enter the directory (mode
0700) can connect. If clients need API keys, everything but adding and removing is also served next to the API, to keys
with `admin`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, params
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pdkv.base.limits import MAX_WAIT_S, clip
from pdkv.errors import InvalidRequest, MalformedMessage
from pdkv.router.generations.generation_records import NUM_ENDED
from pdkv.router.generations.operations import Operations
from pdkv.router.http.pages.cache_pages import MAX_BODY_BYTES as MAX_CACHE_BODY_BYTES
from pdkv.router.http.pages.cache_pages import POOL, CachePages
from pdkv.router.http.pages.page import ERROR_HANDLERS, Flag, Page, freshened, read_body
from pdkv.router.http.server.auth import RESET_PATH
from pdkv.router.http.server.errors import error_body, json_response
from pdkv.router.scaling.autoscaler import Told
from pdkv.router.scaling.scaler import Scaler
from pdkv.wire.decoding import decode_total
from pdkv.wire.profiles import MAX_PROFILE_S, MAX_PROFILE_STEPS

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

_MOVE_S = 5.0
"""Seconds until nothing holds on to an engine from which everything was moved."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Options(_Strict):
    """What may stand behind an engine's path."""

    until: Literal["ready", "drained"] | None = None
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False)] = 0.0
    pid: Annotated[int, Field(ge=0, lt=10**10)] | None = None
    move: Flag = False
    force: Flag = False


class RoleBody(_Strict):
    """The body of POST …/role."""

    role: str


class FallbackBody(_Strict):
    """The body of POST /admin/fallback; what is left out stays."""

    mode: Literal["auto", "off"] | None = None
    share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


class SplitBody(_Strict):
    """The body of POST /admin/split."""

    shares: dict[str, Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]]


class ProfileBody(_Strict):
    """The body of POST /admin/profile."""

    engine: str
    steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] = 32
    seconds: Annotated[float, Field(gt=0, le=MAX_PROFILE_S, allow_inf_nan=False)] = 10.0


class EngineBody(_Strict):
    """The body of PUT for an engine."""

    role: str
    endpoint: str
    refusal: Path | None = None  # of the launcher's note


Asked = Annotated[_Options, Query()]
_ENGINE = "/admin/engines/{name}"
_SCALER = "/admin/autoscaler"
_MAX_TOLD_BYTES = 1 << 20
_told_decoder: msgspec.json.Decoder[Told] = msgspec.json.Decoder(Told)


class AdminPages:
    """What an operator may request from anywhere; the caller has checked the key.

    GET  /admin/engines              {"engines": [as in /topology]}
    GET  /admin/engines/NAME         one of them; with ?until=ready|drained when it is so, or after wait_s seconds;
                                     ready&pid=N: that incarnation
    POST /admin/engines/NAME/drain   it gets no new request; with ?wait_s=N the answer comes when it is drained;
                                     move=true: what it has after that time goes on elsewhere
    POST /admin/engines/NAME/resume  it gets requests again
    POST /admin/fallback             {"mode": "auto" | "off", "share": 0 to 1} (docs/fallback.md)
    POST /admin/split                {"shares": {pool: percent}} (docs/membership.md); answers all that hold now
    POST /admin/profile              {"engine", "steps", "seconds"}: traces its next steps; answers the file
    POST /admin/engines/NAME/role    {"role": "prefill" | "decode" | "any"}
    GET  /admin/cache                what pools and tiers of KV hold and gave (engines/cache_view.py)
    POST /admin/cache/ACTION         lookup, clear, pin, unpin, prefetch, move: of a prompt (cache_pages.py)
    POST /reset_prefix_cache         clear of all engines' pools
    GET  /admin/autoscaler           objectives, figures and decisions of the autoscaler (docs/autoscaling.md)
    GET  /admin/requests/ID          what is known of the requests of that id: a client's x-request-id, a generation's
                                     id in pdkv's logs, or a trace's

    With ?fresh=true the engines are asked first, and what they said before is told only of those that do not answer.
    Every other answer is the engine. A change that would leave no engine for a role is 409, unless ?force=true.
    """

    def __init__(
        self, dispatcher: "Dispatcher", operations: Operations, caches: CachePages, scaler: Scaler | None = None
    ) -> None:
        self._dispatcher = dispatcher
        self._scaler_or_none = scaler
        self._operations = operations
        self._caches = caches

    def routes(self) -> list[Page]:
        """All of them; the description of the API does not have them."""
        told = freshened(self._dispatcher)
        pages: list[tuple[str, str, Callable[..., Any], list[params.Depends]]] = [
            ("GET", "/admin/engines", self._engines, told),
            ("GET", "/admin/cache", self._show_cache, told),
            ("GET", _ENGINE, self._engine, []),
            ("POST", _ENGINE + "/drain", self._drain, []),
            ("POST", _ENGINE + "/resume", self._resume, []),
            ("POST", _ENGINE + "/role", self._set_role, []),
            ("GET", _SCALER, self._show_scaler, []),
            ("POST", "/admin/fallback", self._set_fallback, []),
            ("POST", "/admin/split", self._split, []),
            ("POST", "/admin/profile", self._profile, []),
            ("GET", "/admin/requests/{name:path}", self._requests, []),
            ("POST", "/admin/cache/{action}", self._order_cache, []),
            ("POST", RESET_PATH, self._reset_caches, []),
        ]
        return [
            Page(path, page, methods=[method], dependencies=first, include_in_schema=False)
            for method, path, page, first in pages
        ]

    async def _engines(self) -> Response:
        return json_response(self._dispatcher.topology())

    async def _show_cache(self) -> Response:
        return json_response(self._caches.describe())

    @property
    def _scaler(self) -> Scaler:
        if self._scaler_or_none is None:
            raise InvalidRequest("this launch does not choose the number of its engines (--autoscale)", status=404)
        return self._scaler_or_none

    async def _show_scaler(self) -> Response:
        return json_response(self._scaler.describe())

    async def _engine(self, name: str, asked: Asked) -> Response:
        self._operations.describe(name)
        if asked.until is not None:
            await self._operations.wait(name, asked.until, asked.wait_s, asked.pid)
        return self._answer(name)

    async def _drain(self, name: str, asked: Asked) -> Response:
        self._operations.drain(name, force=asked.force)
        is_drained = await self._operations.wait(name, "drained", asked.wait_s)
        if not is_drained and asked.move and self._operations.describe(name)["draining"]:  # not if it was resumed
            self._operations.move_away(name)
            await self._operations.wait(name, "drained", _MOVE_S)
        return self._answer(name)

    async def _resume(self, name: str) -> Response:
        self._operations.resume(name)
        return self._answer(name)

    async def _set_role(self, name: str, body: RoleBody, asked: Asked) -> Response:
        self._operations.set_role(name, body.role, force=asked.force)
        return self._answer(name)

    async def _set_fallback(self, body: FallbackBody) -> Response:
        return json_response(self._operations.set_fallback(body.mode, body.share))

    async def _split(self, body: SplitBody) -> Response:
        return json_response({"shares": self._operations.split(body.shares)})

    async def _profile(self, body: ProfileBody) -> Response:
        return json_response(await self._operations.profile(body.engine, body.steps, body.seconds))

    def _answer(self, name: str) -> Response:
        return json_response(self._operations.describe(name))

    async def _order_cache(self, action: str, request: Request) -> Response:
        return json_response(await self._caches.answer(action, await read_body(request, MAX_CACHE_BODY_BYTES)))

    async def _reset_caches(self) -> Response:
        return json_response(await self._caches.answer("clear", b'{"tier": "%s"}' % POOL.encode()))

    async def _requests(self, name: str) -> Response:
        pools = self._dispatcher.pools if name else ()
        found = [each for pool in pools for each in pool.driver.find_requests(name)]
        if found:
            return json_response({"requests": found})
        text = f"no request {clip(name)!r} is running, or among the last {NUM_ENDED} choices that ended"
        return json_response(error_body(text, status=404, code="request_not_found"), 404)


class LauncherPages(AdminPages):
    """Pages of the private directory: all of these, and what only this host's user may do.

    GET  /admin/figures              `figures()`: metrics without labels, by name (`pd status`)
    PUT  /admin/engines/NAME         {"role", "endpoint", "refusal"}: the launcher has started one more
    DELETE /admin/engines/NAME       the launcher is about to end it
    POST /admin/autoscaler           what the launcher is doing (`Told`); the answer is what it should do (`Orders`)
    """

    def app(self, figures: Callable[[], dict[str, float]] = dict) -> FastAPI:
        """The ASGI application."""

        async def show_figures() -> Response:
            return json_response(figures())

        own = [
            Page(_ENGINE, self._add, methods=["PUT"]),
            Page(_ENGINE, self._remove, methods=["DELETE"]),
            Page(_SCALER, self._review, methods=["POST"]),
            Page("/admin/figures", show_figures),
        ]
        return FastAPI(routes=[*self.routes(), *own], openapi_url=None, exception_handlers=ERROR_HANDLERS)

    async def _add(self, name: str, body: EngineBody) -> Response:
        self._operations.add(name, body.role, body.endpoint, body.refusal)
        return self._answer(name)

    async def _review(self, request: Request) -> Response:
        scaler, body = self._scaler, await read_body(request, _MAX_TOLD_BYTES)
        try:
            return json_response(scaler.review(decode_total(_told_decoder, body)))
        except MalformedMessage as error:
            raise InvalidRequest(f"this is not what a launcher says: {error}") from None

    async def _remove(self, name: str, asked: Asked) -> Response:
        self._operations.remove(name, force=asked.force)
        return json_response({"removed": name})
