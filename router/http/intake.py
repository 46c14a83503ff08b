"""From a connection to a prepared request: the body within its bounds, decoded and tokenized off the event loop."""

import asyncio
import functools
from collections.abc import Callable
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive

from pdkv.config import HttpLimits
from pdkv.errors import InvalidRequest, RequestTimeout
from pdkv.router.http.budget import ByteBudget, Share
from pdkv.router.http.deadline import Deadline
from pdkv.router.http.request_body import Disconnected, read_body
from pdkv.router.http.served_model import Cancelled
from pdkv.router.http.text_pool import INLINE_BYTES, TextPool

T = TypeVar("T")


class Intake:
    """Where bodies come in; one budget and one pool for all endpoints."""

    def __init__(self, limits: HttpLimits, bodies: ByteBudget, pool: TextPool) -> None:
        self._limits = limits
        self._bodies = bodies
        self._pool = pool

    async def read(
        self,
        headers: Headers,
        receive: Receive,
        prepare: Callable[[bytes | bytearray, Cancelled], T],
        deadline: Deadline,
        *,
        request_id: str,
        on_body: Callable[[], None],
    ) -> tuple[T, "asyncio.Task[None]"]:
        """What `prepare` makes of the body, and the task that ends when the client goes away.

        The body is dropped on return. `on_body` is called when it is complete.

        Raises:
            InvalidRequest: the body is too large, or came too slowly; or what `prepare` raises.
            RequestTimeout: the deadline has passed.
            ServerBusy: there is no room for it now.
            Disconnected: the client is gone.
        """
        body_timeout_s = min(deadline.left_s, self._limits.body_timeout_s)
        with Share(self._bodies) as share:
            try:
                body = await read_body(
                    headers, receive, share, limit=self._limits.max_body_bytes, timeout_s=body_timeout_s
                )
            except TimeoutError:
                what = "the body did not arrive within"
                if deadline.timeout_s <= self._limits.body_timeout_s:
                    raise RequestTimeout(f"{what} {deadline.timeout_s:g} s", request_id=request_id) from None
                text = f"{what} {self._limits.body_timeout_s:g} s (--body-timeout-s)"
                raise InvalidRequest(text, status=408) from None
            on_body()
            gone = asyncio.create_task(_wait_until_gone(receive))
            try:
                if len(body) <= INLINE_BYTES:
                    return prepare(body, gone.done), gone
                return await self._prepare_on_thread(body, prepare, gone, deadline, request_id), gone
            except BaseException:
                gone.cancel()
                raise

    async def _prepare_on_thread(
        self,
        body: bytes | bytearray,
        prepare: Callable[[bytes | bytearray, Cancelled], T],
        gone: "asyncio.Task[None]",
        deadline: Deadline,
        request_id: str,
    ) -> T:
        """Given up when the client goes away or its deadline passes."""
        work = asyncio.ensure_future(self._pool.run(len(body), functools.partial(prepare, body)))
        try:
            await asyncio.wait({work, gone}, timeout=deadline.left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            if gone.done():
                raise Disconnected
            text = f"the prompt was not tokenized within the request's {deadline.timeout_s:g} s"
            raise RequestTimeout(text, request_id=request_id)
        finally:
            work.cancel()
            del work  # a failure's traceback holds this frame: it must not hold the failure, and the body with it


async def _wait_until_gone(receive: Receive) -> None:
    """Returns when the client has gone away; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
