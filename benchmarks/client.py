"""The least OpenAI client that can time a stream: one connection, httptools, a time stamp per event.

The load generator shares the cores with the servers that it measures, so a token must cost it next to nothing.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httptools


class Reply:
    """One answer: when its parts came, or why it failed. Times are of time.perf_counter, in seconds."""

    def __init__(self, sent: float) -> None:
        self.sent = sent
        self.stamps: list[float] = []  # one per event that holds a choice
        self.num_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, that were not computed
        self.token_ids: list[int] = []  # where they were asked for
        self.error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it was complete."""
        return self.error is None

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first token."""
        return self.stamps[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.stamps[-1] - self.stamps[0]) / max(self.num_tokens - 1, 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events."""
        return [b - a for a, b in zip(self.stamps, self.stamps[1:], strict=False)]


class _Stream(asyncio.Protocol):
    """Parses one response; httptools calls the on_* methods."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._body: list[bytes] = []  # of an error
        self._done = False

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"malformed response: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None if self._done else f"the connection ended early: {exc!r}")

    def on_body(self, body: bytes) -> None:
        """A part of the body; events may be cut anywhere."""
        if self._parser.get_status_code() != 200:
            self._body.append(body)
            return
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            self._event(event)

    def on_message_complete(self) -> None:
        """The response is whole."""
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"HTTP {status}: {b''.join(self._body)[:200].decode(errors='replace')}")
        else:
            self._end(None if self._done else "the stream ended without [DONE]")

    def _event(self, event: bytes) -> None:
        if event == b"data: [DONE]":
            self._done = True
        elif b'"usage":null' in event or b'"usage":' not in event:
            if b'"error":' in event and "error" in json.loads(event[5:]):
                self._end(event[:200].decode(errors="replace"))
            self.reply.stamps.append(self._now)
            if b'"token_ids":[' in event:
                self.reply.token_ids += json.loads(event[5:])["choices"][0]["token_ids"]
        else:
            body: dict[str, Any] = json.loads(event[5:])
            if body.get("usage"):
                self.reply.num_tokens = body["usage"]["completion_tokens"]
                prompt = body["usage"].get("prompt_tokens_details") or {}
                self.reply.num_cached_tokens = prompt.get("cached_tokens") or 0
            if body.get("choices"):
                self.reply.stamps.append(self._now)

    def _end(self, error: str | None) -> None:
        if not self.ended.done():
            self.reply.error = error
            self.ended.set_result(None)


async def complete(
    url: str,
    *,
    model: str,
    prompt: list[int],
    max_tokens: int,
    reply: Reply | None = None,
    shape: Mapping[str, Any] | None = None,
    token_ids: bool = False,
) -> Reply:
    """Stream one greedy completion of exactly `max_tokens` tokens. Never raises: the reply says what went wrong.

    Args:
        reply: is filled in while the answer comes, for callers that cancel this before its end.
        shape: `structured_outputs`; the answer may end early then.
        token_ids: store the answer's token ids in the reply; for clients whose time does not matter.
    """
    where = urlsplit(url)
    body = json.dumps({
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if shape is None else {"structured_outputs": shape}),
        **({"return_token_ids": True} if token_ids else {}),
    }).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    reply = Reply(time.perf_counter()) if reply is None else reply
    transport: asyncio.Transport | None = None
    try:
        loop = asyncio.get_running_loop()
        transport, stream = await loop.create_connection(lambda: _Stream(reply), where.hostname or "", where.port or 80)
        transport.write(head.encode() + body)
        await stream.ended
    except OSError as error:
        reply.error = repr(error)
    finally:
        if transport is not None:
            transport.close()
    if reply.ok and not reply.stamps:
        reply.error = "no token arrived"
    if reply.ok and shape is None and reply.num_tokens != max_tokens:
        reply.error = f"{reply.num_tokens} tokens instead of {max_tokens}"
    return reply
