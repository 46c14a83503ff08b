"""The body of a request: received within its bounds of size, time and memory."""

import asyncio
from typing import cast

from starlette.datastructures import Headers
from starlette.types import Receive

from pdkv.errors import InvalidRequest
from pdkv.limits import clip
from pdkv.router.http.budget import Share


class Disconnected(Exception):
    """The client is gone: nobody is left to be told anything."""


async def read_body(
    headers: Headers, receive: Receive, share: Share, *, limit: int, timeout_s: float
) -> bytes | bytearray:
    """The request's body, JSON by its content type; `share` holds its bytes.

    Raises:
        InvalidRequest: another content type (415), or more than `limit` bytes (413).
        ServerBusy: there is no memory for it now.
        Disconnected: the client went away.
        TimeoutError: it is not here within `timeout_s`.
    """
    content_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(f"content-type must be application/json, got {clip(content_type)!r}", status=415)
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > limit):
        raise _too_large(limit)
    async with asyncio.timeout(timeout_s):
        return await _receive_all(receive, share, limit)


async def _receive_all(receive: Receive, share: Share, limit: int) -> bytes | bytearray:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        if len(body) + len(piece) > limit:
            raise _too_large(limit)
        share.take(len(piece))
        if not body and not message.get("more_body", False):
            return cast(bytes, piece)  # no second copy of what came at once
        body += piece
        if not message.get("more_body", False):
            return body


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the body must have at most {limit} bytes (--max-body-bytes)", status=413)
