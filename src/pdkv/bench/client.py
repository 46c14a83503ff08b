"""An HTTP client that times streams and costs little: one protocol object per connection, a time stamp per event.

It often shares the cores with the server that it measures, so a token must cost it next to nothing.
"""

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.base.log_fields import printable
from pdkv.errors import ConfigError

MAX_ERROR_CHARS = 300
MAX_EVENT_BYTES, MAX_EVENTS = 16 << 20, 1 << 20

_decode, _now = msgspec.json.decode, MONOTONIC.now


class Reply:
    """An answer: when its parts arrived, or why it failed. Times are those of the clock, in seconds."""

    def __init__(self, sent: float = 0.0, *, keep_text: bool = False) -> None:
        """`keep_text`: store the text and, where the server sends them, the token ids."""
        self.sent = sent
        self.stamps: list[float] = []  # one per event that holds a choice
        self.has_usage = False  # whether the server counted tokens; otherwise each event counts as one
        self.num_tokens = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, that were not computed
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.error: str | None = None
        self.keep_text = keep_text

    @property
    def ok(self) -> bool:
        """Whether it was complete."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps[0] - self.sent

    @property
    def latency(self) -> float:
        """Seconds from sending to the last token."""
        return self.stamps[-1] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.stamps[-1] - self.stamps[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


class _Connection(asyncio.Protocol):
    """One connection, which carries one request at a time; httptools calls the on_* methods."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_reusable = False
        self.has_heard = False  # of the request under way
        self._reply = Reply()
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, data: bytes, reply: Reply) -> asyncio.Future[None]:
        """Send a request. The future ends with the answer, or when the reply says why there is none."""
        assert self.transport is not None
        self._reply, self._ended = reply, asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._is_done = self.is_reusable = self.has_heard = False
        self.transport.write(data)
        return self._ended

    def close(self) -> None:
        """Close the connection."""
        self.is_reusable = False
        if self.transport is not None:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._now, self.has_heard = _now(), True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as error:  # AttributeError: data without a request
            self._end(f"malformed response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        self._end(None if self._ended is None or self._is_done else f"the connection ended early: {exc!r}")

    def on_body(self, body: bytes) -> None:
        """A part of the body; events may be cut anywhere."""
        if self._parser.get_status_code() != 200:
            self._rest = (self._rest + body)[:MAX_ERROR_CHARS]
            return
        data = self._rest + body
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._event(event)
        if len(self._rest) > MAX_EVENT_BYTES or len(self._reply.stamps) > MAX_EVENTS:
            self._end(f"more than {MAX_EVENTS} events, or an event of more than {MAX_EVENT_BYTES >> 20} MiB")
            self.close()

    def on_message_complete(self) -> None:
        """The response is whole."""
        status = self._parser.get_status_code()
        self.is_reusable = self._parser.should_keep_alive()
        if status != 200:
            self._end(f"HTTP {status}: {self._rest.decode(errors='replace')}")
        else:
            if self._rest.strip():
                self._event(self._rest.strip())
            self._end(None if self._is_done else "the stream ended without [DONE]")

    def _event(self, event: bytes) -> None:
        if not event.startswith(b"data:"):
            event = event[event.find(b"\ndata:") + 1 :]  # behind other fields, such as `id`
            if not event.startswith(b"data:"):
                return  # a comment that keeps the connection open
        if event.endswith(b"[DONE]") and event[5:].strip() == b"[DONE]":
            self._is_done = True
            return
        reply = self._reply
        has_usage = b'"usage":' in event and b'"usage":null' not in event
        if reply.stamps and not (has_usage or reply.keep_text or b'"error":' in event):
            reply.stamps.append(self._now)
            return
        try:
            self._read(_decode(event[5:]))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            self._end(f"malformed event {event[:MAX_ERROR_CHARS]!r}: {error!r}")

    def _read(self, body: dict[str, Any]) -> None:
        """Take in an event that is worth decoding."""
        reply = self._reply
        if body.get("error"):
            self._end(str(body["error"])[:MAX_ERROR_CHARS])
        if usage := body.get("usage"):
            reply.has_usage = True
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts = usage["completion_tokens"], usage["prompt_tokens"], cached
            if not all(type(count) is int and count >= 0 for count in counts):
                raise TypeError(f"numbers of tokens were expected, got {counts}")
            reply.num_tokens, reply.num_prompt_tokens, reply.num_cached_tokens = counts
        for choice in body.get("choices") or ():
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            if not isinstance(text, str):
                raise TypeError(f"a text was expected, got {text!r:.80}")
            if text or "text" in choice or not delta.get("role"):  # a chat stream opens with a role and no token
                reply.stamps.append(self._now)
            if reply.keep_text:
                reply.text.append(text)
                reply.token_ids += choice.get("token_ids") or ()

    def _end(self, error: str | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._reply.error = error and printable(error)  # for a terminal
            self._ended.set_result(None)


class Client:
    """Connections to one server. Used as a context manager; idle connections are used again."""

    def __init__(self, url: str, headers: Mapping[str, str] = {}) -> None:
        """Raises ConfigError for anything but an http or https URL."""
        where = urlsplit(url)
        is_tls = where.scheme == "https"
        self._context = ssl.create_default_context() if is_tls else None
        try:
            self._address = where.hostname or "", where.port or (443 if is_tls else 80)
        except ValueError:
            self._address = "", 0
        if where.scheme not in ("http", "https") or not self._address[0]:
            raise ConfigError(f"a server's URL such as http://127.0.0.1:8000 was expected, got {url!r}")
        self.path = where.path.rstrip("/").removesuffix("/v1")
        lines = {"host": where.netloc.rpartition("@")[2], "content-type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    async def stream(self, path: str, body: bytes, reply: Reply) -> Reply:
        """POST a body and fill `reply` in while the answer arrives. Never raises: the reply says what went wrong."""
        head = f"POST {self.path}{path} HTTP/1.1\r\n{self._head}content-length: {len(body)}\r\n\r\n"
        data = head.encode() + body
        connection: _Connection | None = None
        reply.sent = _now()  # connecting is a part of what a user waits for
        try:
            connection, is_new = await self._connection()
            await connection.ask(data, reply)
            if not is_new and not connection.has_heard:  # the server had closed the idle one
                reply.sent = _now()
                connection, _ = await self._connection(new=True)
                await connection.ask(data, reply)
        except OSError as error:
            reply.error = repr(error)
        finally:
            self._give_back(connection)
        if reply.ok and not reply.stamps:
            reply.error = "no token arrived"
        if reply.ok and not reply.has_usage:
            reply.num_tokens = len(reply.stamps)
        return reply

    async def _connection(self, *, new: bool = False) -> tuple[_Connection, bool]:
        while self._idle and not new:
            connection = self._idle.pop()
            if connection.transport is not None and not connection.transport.is_closing():
                return connection, False
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, *self._address, ssl=self._context)
        return connection, True

    def _give_back(self, connection: _Connection | None) -> None:
        if connection is not None and connection.is_reusable:
            self._idle.append(connection)
        elif connection is not None:
            connection.close()
