"""Access control: an API key for every path that is not open to all, an admin's key for some."""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest, PdkvError, Unauthorized
from pdkv.router.admission.api_keys import KeyRing
from pdkv.router.admission.tenants import TENANT
from pdkv.router.http.server.errors import describe_error, json_response

OPEN_PATHS = frozenset({"/live", "/ready", "/health", "/ping", "/version", "/docs", "/openapi.json", "/dashboard"})
"""Paths that need no key. All others do."""

OBSERVED_PATHS = frozenset({"/metrics", "/topology"})
"""Further paths that need none, unless --protect-metrics is given: then they need an admin's."""

RESET_PATH = "/reset_prefix_cache"
"""A path of vLLM's that needs an admin's key."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class PlainPaths:
    """ASGI middleware: 404 for a path with a control character, before the path is compared.

    Routes are regular expressions, whose `$` also matches before a line end: `/metrics%0A` would be served as
    `/metrics`, and is no path that `Authenticate` knows.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _CONTROL.search(scope["path"]):
            text = f"{clip(ascii(scope['path']))}: a path has no control characters"
            await _refusal(InvalidRequest(text, status=404))(scope, receive, send)
            return
        await self._app(scope, receive, send)


class Authenticate:
    """ASGI middleware: puts the tenant into the scope, or answers 401 or 403 before a body is read."""

    def __init__(self, app: ASGIApp, keys: KeyRing, *, protect_metrics: bool) -> None:
        self._app = app
        self._keys = keys
        self._open = OPEN_PATHS if protect_metrics else OPEN_PATHS | OBSERVED_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope["path"], self._open):
            try:
                authenticate(scope, self._keys)
            except Unauthorized as error:
                await _refusal(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def authenticate(scope: Scope, keys: KeyRing) -> None:
    """Put the tenant into the scope. Raises Unauthorized."""
    tenant = keys.authenticate(Headers(scope=scope).get("authorization"))
    if _needs_admin(scope["path"]) and not tenant.grant.admin:
        raise Unauthorized(f"the key {tenant.name!r} has no admin rights (admin = true in the key file)", status=403)
    scope[TENANT] = tenant


def _is_open(path: str, open_paths: Collection[str]) -> bool:
    return path in open_paths or path.startswith(("/docs/", "/dashboard/"))


def _needs_admin(path: str) -> bool:
    return path in ("/admin", RESET_PATH) or path.startswith("/admin/") or path in OBSERVED_PATHS


def _refusal(error: PdkvError) -> Response:
    status, body = describe_error(error)
    headers = {"connection": "close"}  # the body was not read
    return json_response(body, status, headers | {"www-authenticate": "Bearer"} if status == 401 else headers)
