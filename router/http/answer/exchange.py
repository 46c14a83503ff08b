"""One response of a generating endpoint: its id, its headers, and whether it has begun."""

import asyncio
import contextlib
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import msgspec
from starlette.types import Send

from pdkv.base.clock import unix_time
from pdkv.base.log_fields import RequestName
from pdkv.base.trace_context import TraceContext
from pdkv.errors import InvalidRequest, PdkvError
from pdkv.router.admission.desk import Replay, Stay
from pdkv.router.admission.tenants import Tenant
from pdkv.router.generations.generation_records import encode_brief
from pdkv.router.http.answer.event_ids import MAX_CHOICES, EventIds
from pdkv.router.http.answer.fanout import Fanout
from pdkv.router.http.read.job import Job
from pdkv.router.http.server.errors import describe_error

RawHeaders = list[tuple[bytes, bytes]]

_PIECE_BYTES = 256 << 10
"""Bytes of an answer that are given to its connection at a time."""

_PING = b": ping\n\n"
"""A comment, which clients skip."""

MAX_LABEL = 256
"""The most characters of a client's x-request-id."""


class Exchange:
    """One HTTP response: its id, its headers, and whether it has begun."""

    def __init__(
        self, send: Send, send_body: Send, label: str | None, trace: TraceContext, tenant: Tenant | None = None
    ) -> None:
        """`send_body`: used for what follows a response's start. `tenant`: told what is left of its limits."""
        self.trace = trace
        self.status = 0
        """Status of the response; 0: nothing was sent."""
        self.job: Job | None = None
        self.fanout: Fanout | None = None
        self.ids: EventIds | None = None
        """What counts a stream's events; None: they are sent as they are."""
        self._resume_id = ""
        self._seen: tuple[int, ...] = ()
        self._tenant = tenant
        self._send = send
        self._send_body = send_body
        self._label = label or None
        self._encode_failure: Callable[[PdkvError], bytes] | None = None  # of a stream that has begun
        self._sends_head = False  # of a stream
        self._is_silent = True  # no events were sent since the last ping was due
        self.body_is_here = False
        """False if the connection must end with the response, since what is still to come is not a next request."""
        self.reply_id = secrets.token_hex(12)
        self.request_id = label if label and _is_plain(label) else self.reply_id
        self.created = int(unix_time())

    @property
    def name(self) -> RequestName:
        """The request's name in log lines."""
        return RequestName(self.reply_id, 0, label=self.request_id, traceparent=self.trace.traceparent)

    def received(self, tenant: Tenant | None, replay: Replay | None) -> None:
        """Note whose request it is, and that it is an earlier one that is taken up again."""
        self._tenant = tenant
        if replay is not None:
            self.reply_id, self.created, self.request_id, self._seen = replay[1:5]

    def may_resume(self, stay: Stay, num_choices: int, *, with_ids: bool) -> None:
        """Let the client of a stream of so many choices take it up again, if it can be; `with_ids`: its events say
        where they are in it.
        """
        if stay.resume_id and 0 < num_choices <= MAX_CHOICES:
            self._resume_id = stay.resume_id
            if with_ids or self._seen:
                self.ids = EventIds(stay.resume_id if with_ids else "", num_choices, self._seen)

    def check_label(self) -> None:
        """Raise InvalidRequest for a client's x-request-id that cannot be echoed."""
        if self._label is not None and not _is_plain(self._label):
            raise InvalidRequest(
                f"x-request-id must have at most {MAX_LABEL} characters, all printable ASCII", param="x-request-id"
            )

    async def send_whole(
        self, status: int, data: bytes, engines: tuple[str, str] = ("", ""), *, retry_after_s: float = 1.0
    ) -> None:
        """Send the whole response as JSON; returns when its client has read all but the last piece. `retry_after_s` is
        sent with 429 and 503.
        """
        headers = self._headers(b"application/json", engines)
        headers.append((b"content-length", b"%d" % len(data)))
        if status in (429, 503):
            headers.append((b"retry-after", b"%d" % math.ceil(retry_after_s)))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if not self.body_is_here:
            headers.append((b"connection", b"close"))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        for begin in range(0, len(data), _PIECE_BYTES):
            end = begin + _PIECE_BYTES
            await self._send_body({"type": "http.response.body", "body": data[begin:end], "more_body": end < len(data)})

    async def begin_events(self, engines: tuple[str, str], fail: Callable[[PdkvError], bytes]) -> None:
        """Send the head of a stream, unless it was sent; `fail` makes its last events, should it fail."""
        if self._encode_failure is not None:
            return
        headers = self._headers(b"text/event-stream; charset=utf-8", engines)
        headers.append((b"cache-control", b"no-cache"))
        self._sends_head = True
        try:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self.status, self._encode_failure = 200, fail
        finally:
            self._sends_head = False

    @contextlib.contextmanager
    def pinging(self, ping_s: float, fail: Callable[[PdkvError], bytes]) -> Iterator[None]:
        """Within the block, a stream that is silent for `ping_s` seconds, twice as many at most, gets a comment, and
        before that its head; `fail` as for `begin_events`. It costs a stream a timer, and an event nothing.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            timer = loop.call_later(ping_s, look)
            if self._is_silent:
                _send_now(self._ping(fail))
            self._is_silent = True

        timer = loop.call_later(ping_s, look)
        try:
            yield
        finally:
            timer.cancel()

    async def _ping(self, fail: Callable[[PdkvError], bytes]) -> None:
        if self._sends_head:
            return  # it waits for its client
        await self.begin_events(self.fanout.engines if self.fanout is not None else ("", ""), fail)
        await self.send_events(_PING)

    def ask(self) -> None:
        """Send a stream that has begun a comment: whether its client is still there, its host says to that."""
        if self._encode_failure is not None:
            _send_now(self._ping(self._encode_failure))

    def send_events(self, data: bytes) -> Awaitable[None]:
        """Send a part of a stream that has begun."""
        self._is_silent = False
        return self._send_body({"type": "http.response.body", "body": data, "more_body": True})

    def end_events(self, data: bytes) -> Awaitable[None]:
        """Send the last part of a stream."""
        return self._send_body({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: PdkvError) -> None:
        """Send an error status if nothing was sent yet, and otherwise the stream's own last events."""
        if self._encode_failure is not None:
            await self.end_events(self._encode_failure(error))
        else:
            status, body = describe_error(error)
            retry_after_s = getattr(error, "retry_after_s", 1.0)
            await self.send_whole(status, msgspec.json.encode(body), retry_after_s=retry_after_s)

    def _headers(self, content_type: bytes, engines: tuple[str, str]) -> RawHeaders:
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode("latin-1"))]
        for name, engine in zip((b"x-pd-prefill-engine", b"x-pd-decode-engine"), engines, strict=True):
            if engine:
                headers.append((name, engine.encode("latin-1")))
        if self.fanout is not None and self.fanout.job.explain:
            headers.append((b"x-pd-decision", encode_brief(self.fanout.generations.values())))
        if self._resume_id:
            headers.append((b"x-pd-resume-id", self._resume_id.encode()))
        if self._tenant is not None:
            headers += self._tenant.rate_headers()
        return headers


def _send_now(sending: Coroutine[Any, Any, None]) -> None:
    """Send at once, or not at all: where sending has to wait, the client has yet to read what was sent before."""
    try:
        sending.send(None)
    except StopIteration:
        return
    sending.close()


def _is_plain(label: str) -> bool:
    """Whether a label may appear in a header and in a log line: without control characters, such as U+009B."""
    return len(label) <= MAX_LABEL and label.isascii() and label.isprintable()
