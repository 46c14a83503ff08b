"""Access log: one line per request on the logger `pdkv.access`: client, outcome, engines, tokens by source, times.

Requests that generate write their own line; `AccessLogged` writes the others. No line contains any part of a prompt, a
reply, a header other than the client's ids, or a query string.
"""

import json
import logging
import re
from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdkv.base.clock import MONOTONIC
from pdkv.base.limits import clip
from pdkv.base.log_fields import LogFields, printable
from pdkv.router.admission.tenants import TENANT

logger = logging.getLogger("pdkv.access")

CLIENT_GONE = 499
"""The status of a request whose client left before there was one, as in nginx."""

QUIET_PATHS = frozenset({"/live", "/ready", "/health", "/metrics", "/ping", "/load", "/admin/overview"})
"""Paths that monitors and open pages request every few seconds: logged only if they fail."""

_MAX_CLIENT = 64
"""The most characters shown of an address and its port; an IPv6 address has 45 at most."""

_WORD = re.compile(r"[!#-<>-~]+")  # written unquoted in a text line: no space, no quote, no "="


class AccessLine(LogFields):
    """One request's line. As text it begins `METHOD PATH STATUS OUTCOME`, followed by NAME=VALUE; None is left out."""

    __slots__ = ("_fields",)

    def __init__(self, scope: Scope, *, status: int, outcome: str, duration_s: float, **fields: object) -> None:
        """`fields`: further numbers and short texts, in output order."""
        client = scope.get("client")
        self._fields: dict[str, object] = {
            "method": scope["method"],
            "path": clip(scope["path"]),
            "status": status,
            "outcome": outcome,
            "client": clip(f"{client[0]}:{client[1]}", _MAX_CLIENT) if client else None,
            **fields,
            "duration_s": round(duration_s, 6),
        }

    def log_fields(self) -> dict[str, object]:
        """All known fields."""
        return {name: value for name, value in self._fields.items() if value is not None}

    def __str__(self) -> str:
        fields = self._fields
        method, path, status, outcome, *rest = fields.items()
        begin = printable(f"{method[1]} {path[1]} {status[1]} {outcome[1]}")
        return " ".join([begin, *[f"{name}={_shown(value)}" for name, value in rest if value is not None]])


def _shown(value: object) -> str:
    """A value of a text line: as it is, or quoted if it would not be one word."""
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) else json.dumps(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value).lower()


def log_access(line: AccessLine) -> None:
    """Write the line of a request, if such lines are wanted."""
    logger.info("%s", line)


def wants_access_lines() -> bool:
    """Whether access lines are enabled."""
    return logger.isEnabledFor(logging.INFO)


def key_name(scope: Scope) -> str | None:
    """Name of the API key; None if there is none."""
    tenant = scope.get(TENANT)
    return tenant.name if tenant is not None else None


class AccessLogged:
    """ASGI around an application: the lines of its requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not wants_access_lines():
            await self._app(scope, receive, send)
            return
        status = 0
        began = MONOTONIC.now()

        def watched(message: Message) -> Awaitable[None]:  # not a coroutine: it is called for every token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # the status that the server will send
            raise
        finally:
            status = status or CLIENT_GONE
            if status >= 400 or scope["path"] not in QUIET_PATHS:
                outcome = "ok" if status < 400 else "refused" if status < 500 else "failed"
                duration_s = MONOTONIC.now() - began
                fields: dict[str, Any] = {"key": key_name(scope)}
                log_access(AccessLine(scope, status=status, outcome=outcome, duration_s=duration_s, **fields))
