"""HTTP connections with limits: uvicorn's protocol, with limits on headers, URLs, time and unsolicited data.

uvicorn's own protocol accepts headers of any size, waits for them without end, answers parser errors in plain text and
closes connections on clients that are still sending, which then see a reset instead of the answer.
"""

import asyncio
import enum
import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import httptools
import msgspec
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdkv.base.limits import clip
from pdkv.config import HttpLimits
from pdkv.router.admission.tenants import payer
from pdkv.router.http.server.budget import SMALL_BYTES, ByteBudget, Held
from pdkv.router.http.server.connections import Connections
from pdkv.router.http.server.errors import error_body
from pdkv.router.http.server.paused_body import ASK, CLOSED, PAUSE_BODY, PausedBody
from pdkv.router.http.server.request_size import PARSED_BYTES, Refusal, RequestSize, host_refusal
from pdkv.router.http.server.response_transport import ResponseTransport
from pdkv.router.http.server.turnstile import Turnstile, client_of
from pdkv.router.http.server.unframed import unframed

logger = logging.getLogger(__name__)

_LINGER_S = 5.0
_LINGER_BYTES = 256 << 20
"""Seconds and bytes for which a client's remaining input is read and dropped, so that it reads the answer before the
end.
"""

_URGENT_PATHS = frozenset({"/live", "/ready", "/health", "/ping"})
"""Paths requested by monitors that take a late answer for a dead router; cheap, so they bypass the turnstile."""


_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _Phase(enum.Enum):
    IDLE = enum.auto()  # nothing of the next request has arrived
    HEADERS = enum.auto()
    BODY = enum.auto()


class _BodyReader:
    """Tells a connection about one body and its trailers, whatever the parser finds after those."""

    def __init__(self, connection: "LimitedProtocol") -> None:
        self._connection = connection
        self._has_begun = self._is_in = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A trailer."""
        if self._has_begun and not self._is_in:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        """The end of the headers, without which the parser would not read a body."""
        self._has_begun = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self._is_in:
            self._connection.on_body(body)

    def on_message_complete(self) -> None:
        """The end of the body."""
        if not self._is_in:
            self._is_in = True
            self._connection.declined_body_is_in()


class LimitedProtocol(HttpToolsProtocol):
    """One HTTP connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
        room: Connections,
        bodies: ByteBudget,
        turnstile: Turnstile,
    ) -> None:
        """All connections share `room`, `turnstile` and `bodies`, which counts the stored bytes of pipelined
        requests.
        """
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._room = room
        self._bodies = bodies
        self._turnstile = turnstile
        self._phase = _Phase.IDLE
        self._size = RequestSize(limits)
        self._refusal: Refusal | None = None  # why the request being parsed is refused
        self._deaf = False  # a response is in progress, and the input after its request is not a request
        self._rest = b""  # received after a request that waits for its turn
        self._kept = Held()  # its bytes
        self._header_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes that the client had to read when that timer was set
        self._must_read = 0  # bytes that it must have read when that timer fires, for the average
        self._num_dropped = 0
        self._paused: PausedBody | None = None  # the body that was last made to wait
        self._served: RequestResponseCycle | None = None  # the last to begin: those after it wait for their turn
        self._ahead: PausedBody | None = None  # watches a client whose input is not read, since it has sent ahead
        self.underlying: asyncio.Transport | None = None  # the transport below TLS; set before the connection is made

    # --- the connection -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or answer that there are too many."""
        self._connection = transport
        super().connection_made(ResponseTransport(transport, self.end))
        self._kept.key = payer({"client": self.client})
        self._room.opened(self)
        if self._room.admit():
            self._room.idle(self)
            self._start_header_timer()
        else:
            self._deaf = True
            self._answer(503, "too many connections: try again later", "server_busy")

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.lost(self)
        self._stop_timers()
        self._drop_rest()
        if self._paused is not None:
            self._paused.left()
        if self.scope is not None:
            cast(dict[str, Any], self.scope).pop(PAUSE_BODY, None)  # else the two know each other
        if isinstance(self.transport, ResponseTransport):
            self.transport.closed = True
        super().connection_lost(exc)
        if self._served is not None and not self._served.response_complete:  # uvicorn only tells the last one received
            self._served.disconnected = True
            self._served.message_event.set()
        self._served = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer a whole request whose client sends nothing more, which is no reason for it not to read. Whether it has
        closed instead, its host says as soon as anything is sent: to ask, an interim response goes out that every
        client skips, or what the application has for that. HTTP/1.0 has none and TLS no half-close: there, the client
        has left.
        """
        cycle = self.cycle
        is_whole = self._phase is _Phase.IDLE and self._responding and not (self._rest or self.pipeline)
        if not is_whole or self.underlying is not None or self.scope["http_version"] == "1.0":
            return False
        if self._ahead is None:  # else this is told again, as reading was resumed
            cycle.keep_alive = False
            if not cycle.response_started:
                self.transport.write(_CONTINUE)
            elif (ask := cast(dict[str, Any], self.scope).get(ASK)) is not None:
                ask()
            self._watch_ahead(CLOSED)
        return True

    @property
    def num_unsent(self) -> int:
        """Bytes written that the kernel has not accepted yet, since the client does not read fast enough."""
        size = self._connection.get_write_buffer_size()
        return size if self.underlying is None else size + self.underlying.get_write_buffer_size()

    def evict(self) -> None:
        """Close now, without an answer."""
        self._connection.abort()

    def end(self) -> None:
        """Close once the client has read the answer: uvicorn has closed the connection."""
        self._room.leave(self)
        self._stop_timers()
        unread = self._phase is not _Phase.IDLE or bool(self._rest) or self._deaf
        self._drop_rest()
        if not unread or self._connection.is_closing():
            self._connection.close()
            self._watch_reader()
            return
        self._room.ending(self)
        self._linger_timer = self.loop.call_later(_LINGER_S, self._connection.abort)
        if self._connection.can_write_eof():  # TLS has no half-close: a header says that the answer is the last one
            self._connection.write_eof()
        if self.flow.read_paused:
            self._connection.resume_reading()

    def shutdown(self) -> None:
        """End at shutdown: a connection that has sent everything need not wait for its client."""
        if self.transport.is_closing() and not self.num_unsent:
            self._connection.abort()
        super().shutdown()

    # --- time -----------------------------------------------------------------------------------------------------

    def _start_header_timer(self) -> None:
        self._unset_keepalive_if_required()
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout_s, self._headers_are_late)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        self._stop_header_timer()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        self._stop_watching_reader()
        self._stop_watching_ahead()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():  # else a little is left to read
            self._stop_watching_reader()

    def _watch_reader(self, must_read: int = 0) -> None:
        """End the connection if its client reads nothing for longer than allowed, or reads too slowly.

        It is too slow if it is more than one such period behind --min-send-rate over the periods so far. With TLS, the
        client must also close properly once it has read everything.
        """
        if self._reader_timer is not None:
            self._num_unread = max(self._num_unread, self.num_unsent)
        else:
            self._num_unread, self._must_read = self.num_unsent, must_read
            parting = self.underlying is not None and self.transport.is_closing()
            if self._num_unread or parting:
                self._reader_timer = self.loop.call_later(self._limits.send_timeout_s, self._check_reader)

    def _check_reader(self) -> None:
        self._reader_timer = None
        num_read = self._num_unread - self.num_unsent
        if num_read > 0 and num_read >= self._must_read:
            per_time = int(self._limits.min_send_rate * self._limits.send_timeout_s)
            self._watch_reader(self._must_read - num_read + per_time)
        else:
            self.evict()

    def _stop_watching_reader(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self._phase is _Phase.HEADERS:
            limit = self._limits.header_timeout_s
            self._refuse(408, f"the headers did not arrive within {limit:g} s (--header-timeout-s)")
        else:
            self.transport.close()

    # --- what is received -----------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._num_dropped += len(data)
            if self._num_dropped > _LINGER_BYTES:
                self.evict()
            return
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        if self._rest or self.pipeline:
            self._keep(data)
        else:
            self._parse(memoryview(data))

    def _parse(self, data: memoryview) -> None:
        """Feed the parser piece by piece, with a check in between, and nothing after a request that has to wait."""
        drops = self._phase is _Phase.BODY and not self._responding
        while data and not self._deaf and not self.transport.is_closing():
            size = len(data) if self._phase is _Phase.BODY else PARSED_BYTES
            self._parse_piece(data[:size])
            data = data[size:]
            if self.pipeline:
                if data:
                    self._keep(bytes(data))
                return
        if drops and self._phase is _Phase.IDLE:
            self._stop_header_timer()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._await_next(heard=not drops)

    def _parse_piece(self, piece: memoryview) -> None:
        self._size.begin_piece()
        try:
            rest = self._feed(piece)
            if rest is not None:
                self._decline_upgrade(rest)
        except httptools.HttpParserCallbackError as error:
            logger.error("failed to receive a request", exc_info=error.__context__)
            self._refuse(500, "internal error", "internal_error")
            return
        except httptools.HttpParserError as error:
            self._refuse(400, f"the request is not valid HTTP/1.1: {error}")
            return
        self._size.end_piece(len(piece))
        refusal = self._refusal or self._too_much()
        if refusal is not None:
            self._refuse(*refusal)

    def _feed(self, piece: memoryview) -> memoryview | None:
        """Feed a piece; returns what follows the headers of a request that offers another protocol, or None."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return piece[upgrade.args[0] :]
        return None

    def _decline_upgrade(self, rest: memoryview) -> None:
        """Serve a request that offers another protocol as if it did not, as a server may (RFC 9110, 7.8).

        The parser takes the input after its headers for the other protocol. It is the body, if there is one; input
        after the body may belong to the other protocol and is dropped.
        """
        if self._refusal is not None:
            return
        length = self._length_of_body()
        if not length:
            self._be_deaf()
            return
        self.parser = httptools.HttpRequestParser(_BodyReader(self))
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + length + b"\r\n\r\n")
        if rest:
            self.parser.feed_data(rest)

    def declined_body_is_in(self) -> None:
        """End the body of a request whose offer of another protocol was declined."""
        self.on_message_complete()
        self._be_deaf()

    def _length_of_body(self) -> bytes:
        """The header that gives the length of the body being parsed; empty: there is no body."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and int(value)):
                return name + b": " + value
        return b""

    def _too_much(self) -> Refusal | None:
        """Why the part of the request so far is refused."""
        if self._phase is _Phase.HEADERS:
            return self._size.too_much_head()
        return self._size.too_small_chunks() if self._phase is _Phase.BODY else None

    def _keep(self, data: bytes) -> None:
        """Store input until the requests before it are answered."""
        if not self._bodies.try_take(self._kept, len(data)):
            self._be_deaf()
            return
        self._rest += data
        self.flow.pause_reading()
        self._watch_ahead()

    def _watch_ahead(self, *signs: int) -> None:
        """Watch for the client leaving: nothing is read until a response is complete."""
        if self._ahead is None:
            self._ahead = PausedBody(self._connection, 0, lambda: None, *signs)

    def _stop_watching_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.end()
            self._ahead = None

    def _drop_rest(self) -> None:
        self._bodies.give(self._kept)
        self._rest = b""

    def _parse_rest(self) -> None:
        rest = self._rest
        self._drop_rest()
        if rest and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._parse(memoryview(rest))

    # --- the parser's callbacks -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEADERS
        self._size.begin()

    def on_url(self, url: bytes) -> None:
        refusal = self._size.add_url(len(url))
        if refusal is None:
            super().on_url(url)
        self._refusal = self._refusal or refusal

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or an unrequested trailer."""
        refusal = self._size.add_header(name, value)
        if refusal is None and self._phase is _Phase.HEADERS:
            super().on_header(name, value)
        self._refusal = self._refusal or refusal

    def on_headers_complete(self) -> None:
        self._stop_header_timer()
        self._phase = _Phase.BODY
        if self._refusal is None and not _has_path(self.url):
            self._refusal = 400, "the request is not valid HTTP/1.1: its URL cannot be parsed"
        if self._refusal is None:
            self._refusal = host_refusal(self.headers, self.parser.get_http_version())
        if self._refusal is None:
            if self._responding:  # it waits for its turn
                self._room.leave(self)
                self._watch_ahead()
            else:
                self._room.receiving(self)
            cast(dict[str, Any], self.scope)[PAUSE_BODY] = self._pause_body
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start the application when it is the request's turn, after the earlier ones on this connection."""
        if isinstance(self.transport, ResponseTransport):
            self.transport.begin_response()
        self._served = cycle
        if cycle.scope["http_version"] == "1.0":
            app = cast(ASGI3Application, unframed(cycle, cast(ASGIApp, app)))
        start = functools.partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] in _URGENT_PATHS:
            start()
        else:
            self._turnstile.enter(start, client_of(cycle.scope["headers"], cycle.scope["client"]))

    def on_body(self, body: bytes) -> None:
        self._size.add_body(len(body))
        if self._refusal is None:
            super().on_body(body)
            if self._size.body_bytes > SMALL_BYTES and not self.cycle.response_complete:
                self.flow.pause_reading()  # the application receives when there is room for more

    def _pause_body(self, on_left: Callable[[], None]) -> PausedBody:
        """The `PauseBody` of this connection. A client that is made to wait is not at fault: it makes no room for
        others.
        """
        self._room.leave(self)
        self.flow.pause_reading()
        self._paused = PausedBody(self._connection, len(self.cycle.body), on_left)
        return self._paused

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._length_of_body():
            return  # its body is still to come
        self._phase = _Phase.IDLE
        self._room.leave(self)
        if self._refusal is None:
            super().on_message_complete()

    # --- what is answered -----------------------------------------------------------------------------------------

    @property
    def _responding(self) -> bool:
        """Whether a request waits for its response, or for the end of it."""
        return self.cycle is not None and not self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._stop_watching_ahead()
        super().on_response_complete()
        if self._responding and self._phase is _Phase.BODY:
            self._room.receiving(self)  # the next request's turn has come before its body
        if self._rest and not self.pipeline:  # what waits may be the body of the current request
            self.loop.call_soon(self._parse_rest)
        else:
            self._await_next()

    def _await_next(self, *, heard: bool = False) -> None:
        """Once every request is answered, wait for the rest of its body, which should be short, or for the next
        request.

        Once a byte was `heard`, little time is left for its headers; the same holds for the rest of a body.
        """
        if self._responding or self._rest or self.transport.is_closing():
            return
        if self._phase is _Phase.BODY:  # the rest of its input is not a next request: it is dropped
            announced = self._length_of_body().partition(b"content-length: ")[2]
            if max(int(announced or 0), self._size.body_bytes) > self._limits.max_body_bytes:
                self.transport.close()
            else:
                self._start_header_timer()
            return
        self._room.idle(self)
        if heard or self._phase is _Phase.HEADERS:
            self._start_header_timer()

    def _be_deaf(self) -> None:
        """Make the current response the last one."""
        self._deaf = True
        self._drop_rest()
        if self._responding:
            self.cycle.keep_alive = False
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str | None = None) -> None:
        """Answer a request that the application does not get, or whose body is broken; the connection ends."""
        if self._responding:
            if not self.cycle.more_body or self.cycle.response_started or self.pipeline:
                self._be_deaf()  # it is not this request's body: no answer fits before the current one
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._deaf = True
        self._answer(status, message, code)

    def _answer(self, status: int, message: str, code: str | None = None) -> None:
        body = msgspec.json.encode(error_body(clip(message, 512), status=status, code=code))
        lines = [
            STATUS_LINE[status],
            *(name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers),
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"retry-after: 1\r\n" if status == 503 else b"",
            b"connection: close\r\n\r\n",
            body,
        ]
        self.transport.write(b"".join(lines))
        self.transport.close()


def _has_path(url: bytes) -> bool:
    """Whether uvicorn accepts a URL."""
    try:
        return httptools.parse_url(url).path is not None
    except httptools.HttpParserInvalidURLError:
        return False
