"""Receives the body of a request within its limits of size, time and memory."""

import asyncio
import zlib
from types import TracebackType
from typing import cast

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from pdkv.base.limits import clip
from pdkv.config import HttpLimits
from pdkv.errors import InvalidRequest, RequestTimeout, ServerBusy
from pdkv.router.http.server.budget import SMALL_BYTES, ByteBudget, Held
from pdkv.router.http.server.deadline import Deadline
from pdkv.router.http.server.paused_body import PAUSE_BODY, PauseBody

_AHEAD_BYTES = 256 * 1024
"""The most bytes that the server reads at once. After a client has sent something, room for as much again is reserved
before more is read, up to this limit: an active client waits rarely, and a silent one holds nothing.
"""

_INFLATED_BYTES = 64 * 1024
"""Bytes of a compressed body that are inflated at once: a quarter of a millisecond."""

_GRACE_S = 5.0
"""Seconds for which a client may be silent while its body is the exempt one and others wait."""

_CHECK_S = 1.0


class Disconnected(Exception):
    """The client is gone, so no reply is needed."""


async def wait_until_gone(receive: Receive) -> None:
    """Wait until the client has gone away; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def read_coding(headers: Headers, *known: str) -> bool:
    """Whether a body is in the one coding that is `known` by these names. Raises InvalidRequest (415) for others."""
    values = ",".join(headers.getlist("content-encoding")).lower().split(",")
    codings = [value.strip() for value in values if value.strip() not in ("", "identity")]
    if not codings or (len(codings) == 1 and codings[0] in known):
        return bool(codings)
    wanted = f"{known[0]} or absent" if known else "absent"
    raise InvalidRequest(f"content-encoding must be {wanted}, got {clip(', '.join(codings))!r}", status=415)


class BodyReader:
    """Receives one body and holds its bytes of the budget until closed. A context manager."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        budget: ByteBudget,
        limits: HttpLimits,
        deadline: Deadline,
        request_id: str,
        key: str = "",
    ) -> None:
        """`key`: the owner, whose share of the budget it takes."""
        self._headers = Headers(scope=scope)
        self._receive = receive
        self._pause: PauseBody | None = scope.pop(PAUSE_BODY, None)
        self._budget = budget
        self._limits = limits
        self._deadline = deadline
        self._request_id = request_id
        self._held = Held(key)
        self._size = 0  # bytes received
        self._may_wait_s = limits.body_timeout_s  # seconds waited for room, in total
        self._is_waiting = self._has_left = self._is_slow = False
        self._watch: asyncio.TimerHandle | None = None

    async def read(self) -> bytes | bytearray:
        """Read the whole body, which must be declared as JSON.

        Raises:
            InvalidRequest: another content type (415), too many bytes (413), or they arrived too slowly (408).
            RequestTimeout: the request's deadline has passed.
            ServerBusy: there was no memory for it in time.
            Disconnected: the client went away.
        """
        content_type = self._headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise InvalidRequest(f"content-type must be application/json, got {clip(content_type)!r}", status=415)
        is_packed = read_coding(self._headers, "gzip", "x-gzip")
        self._inflater = zlib.decompressobj(zlib.MAX_WBITS | 16) if is_packed else None
        announced = self._headers.get("content-length", "0")
        size = int(announced[:19]) if announced.isdecimal() else 0
        if size > self._limits.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(min(self._deadline.left_s, self._limits.body_timeout_s)) as self._timeout:
                if size > SMALL_BYTES:
                    self._held.expected = size
                    await self._hold(1, 0)  # behind others that wait, before any of it is read
                return await self._receive_all(size)
        except TimeoutError:
            raise self._too_late() from None
        finally:
            if self._watch is not None:
                self._watch.cancel()

    async def _receive_all(self, announced: int) -> bytes | bytearray:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            piece, more = message.get("body", b""), message.get("more_body", False)
            if self._inflater is not None:
                await self._inflate(self._inflater, piece, body, is_last=not more)
                size = len(body)
            else:
                size = self._size = len(body) + len(piece)
                if size > self._limits.max_body_bytes:
                    raise self._too_large()
                await self._hold(size, len(piece))
                if not body and not more:
                    return cast(bytes, piece)  # avoids a second copy if it arrived at once
                body += piece
            del piece, message
            if not more:
                return body
            if size > SMALL_BYTES:
                ahead = size + min(size, _AHEAD_BYTES)
                await self._hold(min(ahead, max(announced, size)) if announced else ahead, 0)

    async def _inflate(self, inflater: "zlib._Decompress", piece: bytes, body: bytearray, *, is_last: bool) -> None:
        """Inflate a piece of a compressed body bit by bit: it may become a thousand times as long."""
        made = piece
        while (piece or len(made) == _INFLATED_BYTES) and not inflater.eof:
            try:
                made = inflater.decompress(piece, _INFLATED_BYTES)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not valid gzip: {error}") from None
            body += made
            piece = inflater.unconsumed_tail
            self._size = len(body)
            if self._size > self._limits.max_body_bytes:
                raise self._too_large()
            await self._hold(self._size, len(piece))
            await asyncio.sleep(0)
        if inflater.unused_data or piece or (is_last and not inflater.eof):
            raise InvalidRequest("the body is not valid gzip: it must be one member, and whole")

    async def _hold(self, size: int, num_unread: int) -> None:
        """Reserve room for `size` bytes in total; `num_unread` of them have arrived."""
        missing = size - self._held.size
        if missing > 0 and not self._budget.try_take(self._held, missing):
            await self._wait_for_room(missing, num_unread)

    async def _wait_for_room(self, size: int, num_unread: int) -> None:
        """Wait for room. Meanwhile nothing is read, and the body's own time stands still."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        left_s = (self._timeout.when() or began) - began
        self._timeout.reschedule(began + min(self._may_wait_s, self._deadline.left_s))
        paused = self._pause(self._left) if self._pause is not None else None
        unread = num_unread + (0 if paused is None else paused.num_bytes)
        self._turn = asyncio.ensure_future(self._budget.wait(self._held, size, unread=unread))
        self._is_waiting = True
        try:
            await self._turn
        except asyncio.CancelledError:
            if self._has_left:
                raise Disconnected from None
            raise
        finally:
            if paused is not None:
                paused.end()
        now = loop.time()
        self._is_waiting = False
        self._may_wait_s -= now - began
        self._timeout.reschedule(now + min(left_s, self._deadline.left_s))
        if self._held.is_exempt:
            self._exempt_since, self._exempt_size = now, self._size
            self._watch = loop.call_later(_GRACE_S, self._check_pace)

    def _left(self) -> None:
        if self._is_waiting:
            self._has_left = True
            self._turn.cancel()

    def _check_pace(self) -> None:
        """Require the average pace that its time-out allows from a client that makes others wait."""
        if self._timeout.expired():
            return  # in this turn of the loop, the reader has not seen it yet
        loop = asyncio.get_running_loop()
        pace = self._limits.max_body_bytes / self._limits.body_timeout_s
        expected = pace * (loop.time() - self._exempt_since - _GRACE_S)
        if self._budget.num_waiting and self._size - self._exempt_size <= expected:
            self._is_slow = True
            self._timeout.reschedule(loop.time())
        else:
            self._watch = loop.call_later(_CHECK_S, self._check_pace)

    def _too_large(self) -> InvalidRequest:
        limit = self._limits.max_body_bytes
        return InvalidRequest(f"the body must have at most {limit} bytes (--max-body-bytes)", status=413)

    def _too_late(self) -> RequestTimeout | ServerBusy | InvalidRequest:
        limit_s, timeout_s = self._limits.body_timeout_s, self._deadline.timeout_s
        if timeout_s < limit_s or (timeout_s > limit_s and not self._deadline.left_s):
            what = "there was no room for the body" if self._is_waiting else "the body did not arrive"
            return RequestTimeout(f"{what} within {timeout_s:g} s", request_id=self._request_id)
        if self._is_waiting:
            where = (
                f"{self._budget.what}, {self._budget.limit} bytes, of which a client may hold as much as it leaves free"
            )
            return ServerBusy(f"there was no room for the body within {limit_s:g} s in {where}: try again")
        if self._is_slow:
            return InvalidRequest("the body arrived too slowly while others waited: send it faster", status=408)
        return InvalidRequest(f"the body did not arrive within {limit_s:g} s (--body-timeout-s)", status=408)

    def __enter__(self) -> "BodyReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._budget.give(self._held)
