"""From a connection to a prepared request: receives the body within limits, decodes and tokenizes it off the event
loop.
"""

import asyncio
import functools
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from starlette.types import Receive, Scope

from pdkv.config import HttpApi, HttpLimits
from pdkv.errors import RequestAborted, RequestTimeout
from pdkv.router.admission.desk import Desk
from pdkv.router.admission.tenants import payer
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.router.http.read.text_pool import INLINE_BYTES, TextPool
from pdkv.router.http.server.budget import ByteBudget
from pdkv.router.http.server.deadline import Deadline
from pdkv.router.http.server.drain import Drain
from pdkv.router.http.server.request_body import BodyReader, Disconnected, wait_until_gone
from pdkv.router.metrics.recorder import Recorder
from pdkv.router.metrics.requests import Totals
from pdkv.router.metrics.tracing import Tracer

T = TypeVar("T")

_INLINE_S = 0.005
"""Seconds that a small body may take of the event loop; a schema of 2,000 bytes can take a hundred times as long."""


class Intake:
    """Receives bodies, with one budget and one pool for all endpoints."""

    def __init__(self, limits: HttpLimits, bodies: ByteBudget, pool: TextPool) -> None:
        self._limits = limits
        self._bodies = bodies
        self._pool = pool

    async def read(
        self,
        scope: Scope,
        receive: Receive,
        prepare: Callable[[bytes | bytearray, Cancelled], T],
        deadline: Deadline,
        *,
        request_id: str,
        on_body: Callable[[], None],
        holds: Callable[[T], bool] = lambda made: True,
    ) -> tuple[T, "asyncio.Task[None]"]:
        """The result of `prepare` for the body, and a task that ends when the client goes away.

        The body is dropped on return. `on_body` is called when it is complete, and again where the result no longer
        `holds`, which is then made anew.

        Raises:
            InvalidRequest: the body is too large or arrived too slowly, or `prepare` raises it.
            RequestTimeout: the deadline has passed.
            ServerBusy: there was no memory for it in time.
            Disconnected: the client is gone.
        """
        key = payer(scope)
        with BodyReader(scope, receive, self._bodies, self._limits, deadline, request_id=request_id, key=key) as reader:
            body = await reader.read()
            gone = asyncio.create_task(wait_until_gone(receive))
            try:
                while True:
                    on_body()
                    made = _prepare_inline(body, prepare) if len(body) <= INLINE_BYTES else None
                    if made is None:
                        made = await self._prepare_on_thread(body, prepare, gone, deadline, request_id, key)
                    if holds(made):
                        return made, gone
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
        key: str,
    ) -> T:
        """Prepare on a thread; given up when the client goes away or its deadline passes."""
        work = asyncio.ensure_future(self._pool.run(len(body), functools.partial(prepare, body), key))
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
            del work  # a failure's traceback holds this frame, which must not hold the failure, and with it the body


class Shared(NamedTuple):
    """What all endpoints of a server have in common."""

    desk: Desk
    model: Callable[[], ServedModel]  # as it is served now
    metrics: Totals
    limits: HttpLimits
    api: HttpApi
    intake: Intake
    pool: TextPool
    answers: ByteBudget  # answers that are held
    drain: Drain
    tracer: Tracer | None
    recorder: Recorder | None


def _prepare_inline(body: bytes | bytearray, prepare: Callable[[bytes | bytearray, Cancelled], T]) -> T | None:
    """Prepare on the event loop. None: it would take too long there."""
    end = time.thread_time() + _INLINE_S
    try:
        return prepare(body, lambda: time.thread_time() > end)
    except RequestAborted:
        return None
