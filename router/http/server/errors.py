"""Errors as HTTP replies, in OpenAI's format."""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest, PdkvError

_MAX_MESSAGE_CHARS = 1024
"""The most characters of an error, so that the reply is small however much of the client's text it quotes."""

_KINDS = {403: "permission_error", 429: "rate_limit_error"}


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response with this body."""
    return Response(msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/json")


def error_body(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's format; a long message or field name is clipped."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    param = None if param is None else clip(param)
    return {"error": {"message": clip(message, _MAX_MESSAGE_CHARS), "type": kind, "param": param, "code": code}}


def describe_error(error: PdkvError) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of a failure."""
    param = error.param if isinstance(error, InvalidRequest) else None
    code = None if error.code == InvalidRequest.code else error.code
    return error.status, error_body(str(error), status=error.status, param=param, code=code)
