"""POST /v1/completions and /v1/chat/completions as bare ASGI: body in, one JSON reply or a stream of events out.

No framework between a token and the socket: a response costs one extra task, which waits for the client to go away.
"""

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdkv.errors import InvalidRequest, PdkvError, RequestTimeout
from pdkv.router.choice import ChoiceDelta
from pdkv.router.fanout import Fanout
from pdkv.router.metrics import Endpoint, Metrics, RequestMetrics
from pdkv.router.openai import Job, ServedModel
from pdkv.router.responses import WholeChoice, describe_error, error_status, prompt_extras, usage
from pdkv.router.sse import DONE, ChunkEncoder, error_event

if TYPE_CHECKING:
    from pdkv.router.dispatch import Dispatcher

logger = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]
Prepare = Callable[[bytes, ServedModel], Awaitable[Job]]
"""From a body to a checked request; raises InvalidRequest."""

MAX_LABEL = 256
"""Characters of a client's x-request-id."""


class _Disconnected(Exception):
    """The client is gone: nobody is left to be told anything."""


class GenerateEndpoint:
    """One of the two endpoints that generate."""

    def __init__(
        self,
        name: Endpoint,
        prepare: Prepare,
        *,
        dispatcher: "Dispatcher",
        model: Callable[[], ServedModel],
        metrics: Metrics,
        request_timeout_s: float,
        max_body_bytes: int,
    ) -> None:
        self._name = name
        self._prepare = prepare
        self._dispatcher = dispatcher
        self._model = model
        self._metrics = metrics
        self._request_timeout_s = request_timeout_s
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = RequestMetrics(self._metrics, self._name)
        headers = Headers(scope=scope)
        exchange = _Exchange(send, headers.get("x-request-id"))
        outcome = "internal_error"
        try:
            outcome = await self._serve(headers, receive, exchange, metrics)
        except _Disconnected:
            outcome = "disconnected"
        except PdkvError as error:
            outcome = error.code
            if error_status(error) >= 500:
                logger.warning("request %s failed: %s: %s", exchange.request_id, error.code, error)
            await exchange.fail(error)
        finally:
            metrics.ended(outcome)

    async def _serve(self, headers: Headers, receive: Receive, exchange: "_Exchange", metrics: RequestMetrics) -> str:
        """Serve one request and say how it ended."""
        exchange.check_label()
        timeout_s = min(_client_timeout(headers), self._request_timeout_s)
        try:
            body = await _read_body(headers, receive, self._max_body_bytes, timeout_s)
        except TimeoutError:
            what = f"the body was not here within {timeout_s:g} s"
            raise RequestTimeout(what, request_id=exchange.request_id) from None
        model = self._model()
        job = await self._prepare(body, model)
        fanout = Fanout(job, model, self._dispatcher, metrics, timeout_s=timeout_s, label=exchange.request_id)
        watcher = asyncio.create_task(_abort_when_gone(receive, fanout))
        try:
            async with aclosing(fanout.deltas()) as deltas:
                serve = _stream if job.stream else _reply
                await serve(deltas, fanout, model, exchange)
        except PdkvError as error:
            if fanout.aborted:
                raise _Disconnected from error
            raise
        finally:
            watcher.cancel()
            fanout.abort()
        metrics.served(
            num_prompt_tokens=fanout.num_prompt_tokens,
            num_cached_tokens=fanout.num_cached_tokens,
            num_completion_tokens=fanout.num_completion_tokens,
        )
        return "ok"


class _Exchange:
    """One response: its id, its headers, and whether it has begun."""

    def __init__(self, send: Send, label: str | None) -> None:
        self._send = send
        self._label = label
        self._streaming = False
        self.reply_id = secrets.token_hex(12)
        self.request_id = self.reply_id if label is None or len(label) > MAX_LABEL else label
        self.created = int(time.time())

    def check_label(self) -> None:
        """Raises InvalidRequest for a client's x-request-id that cannot be echoed."""
        if self._label is not None and len(self._label) > MAX_LABEL:
            raise InvalidRequest(f"x-request-id must have at most {MAX_LABEL} characters", param="x-request-id")

    async def send_json(self, status: int, body: object, engines: tuple[str, str] = ("", "")) -> None:
        """The whole response."""
        data = msgspec.json.encode(body)
        headers = self._headers(b"application/json", engines)
        headers.append((b"content-length", b"%d" % len(data)))
        if status == 503:
            headers.append((b"retry-after", b"1"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": data})

    async def send_events(self, data: bytes, engines: Callable[[], tuple[str, str]]) -> None:
        """A part of a stream; the first one begins the response."""
        if not self._streaming:
            headers = self._headers(b"text/event-stream; charset=utf-8", engines())
            headers.append((b"cache-control", b"no-cache"))
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._streaming = True
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_events(self, data: bytes) -> None:
        """The last part of a stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: PdkvError) -> None:
        """A status as long as nothing was sent, an error event and no [DONE] afterwards."""
        if self._streaming:
            await self.end_events(error_event(error))
        else:
            status, body = describe_error(error)
            await self.send_json(status, body)

    def _headers(self, content_type: bytes, engines: tuple[str, str]) -> RawHeaders:
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode("latin-1"))]
        for name, engine in zip((b"x-pd-prefill-engine", b"x-pd-decode-engine"), engines, strict=True):
            if engine:
                headers.append((name, engine.encode("latin-1")))
        return headers


async def _stream(
    deltas: AsyncIterator[Sequence[ChoiceDelta]], fanout: Fanout, model: ServedModel, exchange: _Exchange
) -> None:
    """One write per step of the engines, whatever the number of choices."""
    job = fanout.job
    encoder = ChunkEncoder(
        job,
        fanout.choices,
        model.tokenizer,
        reply_id=_reply_id(job, exchange),
        created=exchange.created,
        model=model.name,
    )
    encode = encoder.encode

    def engines() -> tuple[str, str]:
        return fanout.engines

    async for batch in deltas:
        data = encode(batch[0]) if len(batch) == 1 else b"".join(map(encode, batch))
        await exchange.send_events(data, engines)
    end = DONE
    if job.include_usage:
        end = encoder.encode_usage(_usage(fanout)) + DONE
    await exchange.end_events(end)


async def _reply(
    deltas: AsyncIterator[Sequence[ChoiceDelta]], fanout: Fanout, model: ServedModel, exchange: _Exchange
) -> None:
    """Everything at once, when the last choice is finished."""
    job, tokenizer = fanout.job, model.tokenizer
    wholes = [WholeChoice(choice) for choice in fanout.choices]
    async for batch in deltas:
        for delta in batch:
            wholes[delta.choice].add(delta)
    body: dict[str, Any] = {
        "id": _reply_id(job, exchange),
        "object": "chat.completion" if job.chat else "text_completion",
        "created": exchange.created,
        "model": model.name,
        "choices": [whole.body(job, tokenizer) for whole in wholes],
        "usage": _usage(fanout),
    }
    if job.chat:
        body |= prompt_extras(fanout.choices[0], job, tokenizer)
    await exchange.send_json(200, body, fanout.engines)


def _reply_id(job: Job, exchange: _Exchange) -> str:
    return ("chatcmpl-" if job.chat else "cmpl-") + exchange.reply_id


def _usage(fanout: Fanout) -> dict[str, Any]:
    return usage(fanout.num_prompt_tokens, fanout.num_completion_tokens, fanout.num_cached_tokens)


async def _abort_when_gone(receive: Receive, fanout: Fanout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    fanout.abort()


async def _read_body(headers: Headers, receive: Receive, limit: int, timeout_s: float) -> bytes:
    """The request's body, JSON by its content type.

    Raises:
        InvalidRequest: another content type (415), or more than `limit` bytes (413).
        TimeoutError: it is not here within `timeout_s`.
    """
    content_type = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequest(f"content-type must be application/json, got {content_type!r}", status=415)
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = bytearray()
    async with asyncio.timeout(timeout_s):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return bytes(body)


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"the body must have at most {limit} bytes", status=413)


def _client_timeout(headers: Headers) -> float:
    """Seconds after which the client wants its request to fail; infinite where it does not say."""
    text = headers.get("x-pd-timeout-s")
    if text is None:
        return math.inf
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not timeout_s > 0.0:
        raise InvalidRequest(
            f"x-pd-timeout-s must be a number of seconds above 0, got {text!r}", param="x-pd-timeout-s"
        )
    return timeout_s
