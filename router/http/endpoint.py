"""POST /v1/completions and /v1/chat/completions as bare ASGI: body in, one JSON reply or a stream of events out.

No framework between a token and the socket: a response costs one extra task, which waits for the client to go away.
"""

import asyncio
import functools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdkv.config import HttpLimits
from pdkv.errors import InvalidRequest, PdkvError, ServerBusy
from pdkv.limits import clip
from pdkv.log_fields import RequestName
from pdkv.router.admission.admission_queue import Admission, Visit
from pdkv.router.admission.tenants import TENANT
from pdkv.router.http.access_log import log_access, wants_access_lines
from pdkv.router.http.choice import ChoiceDelta
from pdkv.router.http.deadline import Deadline
from pdkv.router.http.fanout import Fanout
from pdkv.router.http.intake import Intake
from pdkv.router.http.metrics import Endpoint, Metrics, RequestMetrics
from pdkv.router.http.openai import Job
from pdkv.router.http.request_body import Disconnected
from pdkv.router.http.request_report import RequestReport
from pdkv.router.http.responses import WholeChoice, describe_error, error_status, prompt_extras, usage
from pdkv.router.http.served_model import Cancelled, ServedModel
from pdkv.router.http.sse import DONE, ChunkEncoder, error_event
from pdkv.router.http.text_pool import TextPool
from pdkv.router.http.unwound import body_send
from pdkv.router.observability.tracing import Tracer
from pdkv.trace_context import TraceContext, new_trace, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

RawHeaders = list[tuple[bytes, bytes]]
Prepare = Callable[[bytes | bytearray, ServedModel, Cancelled], Job]
"""From a body to a checked request; raises InvalidRequest. Runs on any thread."""

_INLINE_LOGPROBS = 256
"""Tokens with logprobs that are encoded on the event loop; with 20 alternatives each they take some milliseconds."""

MAX_LABEL = 256
"""Characters of a client's x-request-id."""


class GenerateEndpoint:
    """One of the two endpoints that generate."""

    def __init__(
        self,
        name: Endpoint,
        prepare: Prepare,
        *,
        admission: Admission,
        model: Callable[[], ServedModel],
        metrics: Metrics,
        limits: HttpLimits,
        intake: Intake,
        pool: TextPool,
        tracer: Tracer | None = None,
    ) -> None:
        """`intake`, `pool` and `tracer` are shared by the endpoints."""
        self._name = name
        self._prepare = prepare
        self._admission = admission
        self._model = model
        self._metrics = metrics
        self._request_timeout_s = limits.request_timeout_s
        self._intake = intake
        self._pool = pool
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = RequestMetrics(self._metrics, self._name)
        headers = Headers(scope=scope)
        trace = _given_trace(headers)
        span = self._tracer.begin(trace, metrics.began) if self._tracer is not None else None
        if span is not None:
            trace = _context_of(span)
        exchange = _Exchange(send, body_send(send), headers.get("x-request-id"), trace or new_trace())
        outcome, param = "internal_error", None
        try:
            with self._admission.arrive(scope.get(TENANT, self._admission.anonymous)) as visit:
                outcome = await self._serve(scope, receive, exchange, metrics, visit)
        except Disconnected:
            outcome = "disconnected"
        except PdkvError as error:
            outcome, param = error.code, error.param if isinstance(error, InvalidRequest) else None
            if error_status(error) >= 500 and not isinstance(error, ServerBusy):  # a log line each would be work, too
                logger.warning("request %s failed: %s: %s", exchange.name, error.code, error)
            await exchange.fail(error)
        finally:
            metrics.ended(outcome)
            if span is not None or wants_access_lines():
                names = {"request_id": exchange.request_id, "trace_id": exchange.trace.trace_id}
                if param is not None:
                    names["param"] = clip(param)
                report = RequestReport(scope, names, exchange.status, outcome, metrics, exchange.fanout)
                log_access(scope, report.access_line())
                if self._tracer is not None and span is not None:
                    self._tracer.end(span, report.served())

    async def _serve(
        self, scope: Scope, receive: Receive, exchange: "_Exchange", metrics: RequestMetrics, visit: Visit
    ) -> str:
        """Serve one request and say how it ended."""
        exchange.check_label()
        self._admission.check(visit.tenant)
        deadline = Deadline(_client_timeout(Headers(scope=scope)), self._request_timeout_s)
        model = self._model()
        job, gone = await self._receive_job(scope, receive, exchange, model, deadline, visit)
        try:
            job = self._admit(job, visit)
        except BaseException:
            gone.cancel()
            raise
        metrics.prepared(len(job.prompts) * job.n)
        fanout = exchange.fanout = Fanout(
            job,
            model,
            visit,
            metrics,
            deadline=deadline,
            label=exchange.request_id,
            traceparent=exchange.trace.traceparent,
            pool=self._pool,
        )
        gone.add_done_callback(lambda _: fanout.abort())
        try:
            await fanout.begin()
            serve = _stream if job.stream else _reply
            await serve(fanout, model, exchange, self._pool)
        except PdkvError as error:
            if fanout.aborted:
                raise Disconnected from error
            raise
        finally:
            gone.cancel()
            fanout.abort()
            visit.used(fanout.num_begun_tokens + fanout.num_completion_tokens)
        metrics.served(
            num_prompt_tokens=fanout.num_prompt_tokens,
            num_cached_tokens=fanout.num_cached_tokens,
            num_completion_tokens=fanout.num_completion_tokens,
            n=job.n,
        )
        return "ok"

    def _admit(self, job: Job, visit: Visit) -> Job:
        """The request as its tenant may have it. Raises InvalidRequest and TooManyRequests."""
        tenant = visit.tenant
        tenant.check_priority(job.priority)
        if self._admission.config.require_cache_salt and not job.cache_salt:
            raise InvalidRequest(
                "cache_salt is required here (--require-cache-salt): send a secret of whoever may share the cache, "
                "such as a random text per user",
                param="cache_salt",
            )
        lengths = [len(prompt.token_ids) for prompt in job.prompts]
        visit.hold(lengths, job.n, job.params.max_tokens, stream=job.stream)
        salt = tenant.salted(job.cache_salt)
        return job if salt == job.cache_salt else msgspec.structs.replace(job, cache_salt=salt)

    async def _receive_job(
        self,
        scope: Scope,
        receive: Receive,
        exchange: "_Exchange",
        model: ServedModel,
        deadline: Deadline,
        visit: Visit,
    ) -> tuple[Job, "asyncio.Task[None]"]:
        """The checked request, and the task that ends when the client goes away."""

        def prepare(body: bytes | bytearray, cancelled: Cancelled) -> Job:
            return self._prepare(body, model, cancelled)

        def on_body() -> None:
            exchange.body_is_here = True
            self._admission.check(visit.tenant)  # again: it may be full by now, and nothing is tokenized in vain

        return await self._intake.read(
            scope, receive, prepare, deadline, request_id=exchange.request_id, on_body=on_body
        )


class _Exchange:
    """One response: its id, its headers, and whether it has begun."""

    def __init__(self, send: Send, send_body: Send, label: str | None, trace: TraceContext) -> None:
        """`send_body`: for what follows a response's start."""
        self.trace = trace
        self.status = 0
        """0: nothing was sent."""
        self.fanout: Fanout | None = None
        self._send = send
        self._send_body = send_body
        self._label = label
        self._streaming = False
        self.body_is_here = False
        """Else the connection ends with the response: what is still to come is no next request."""
        self.reply_id = secrets.token_hex(12)
        self.request_id = label if label is not None and _is_plain(label) else self.reply_id
        self.created = int(time.time())

    @property
    def name(self) -> RequestName:
        """What log lines call the request."""
        return RequestName(self.reply_id, 0, label=self.request_id, traceparent=self.trace.traceparent)

    def check_label(self) -> None:
        """Raises InvalidRequest for a client's x-request-id that cannot be echoed."""
        if self._label is not None and not _is_plain(self._label):
            raise InvalidRequest(
                f"x-request-id must have at most {MAX_LABEL} characters, all of them printable ASCII",
                param="x-request-id",
            )

    async def send_json(
        self, status: int, body: object, engines: tuple[str, str] = ("", ""), *, retry_after_s: float = 1.0
    ) -> None:
        """The whole response; `retry_after_s` is said with 429 and 503."""
        data = msgspec.json.encode(body)
        headers = self._headers(b"application/json", engines)
        headers.append((b"content-length", b"%d" % len(data)))
        if status in (429, 503):
            headers.append((b"retry-after", b"%d" % math.ceil(retry_after_s)))
        if not self.body_is_here:
            headers.append((b"connection", b"close"))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send_body({"type": "http.response.body", "body": data})

    async def begin_events(self, engines: tuple[str, str]) -> None:
        """The head of a stream."""
        headers = self._headers(b"text/event-stream; charset=utf-8", engines)
        headers.append((b"cache-control", b"no-cache"))
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        self._streaming = True

    def send_events(self, data: bytes) -> Awaitable[None]:
        """A part of a stream that has begun."""
        return self._send_body({"type": "http.response.body", "body": data, "more_body": True})

    def end_events(self, data: bytes) -> Awaitable[None]:
        """The last part of a stream."""
        return self._send_body({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: PdkvError) -> None:
        """A status as long as nothing was sent, an error event and no [DONE] afterwards."""
        if self._streaming:
            await self.end_events(error_event(error))
        else:
            status, body = describe_error(error)
            await self.send_json(status, body, retry_after_s=getattr(error, "retry_after_s", 1.0))

    def _headers(self, content_type: bytes, engines: tuple[str, str]) -> RawHeaders:
        headers = [(b"content-type", content_type), (b"x-request-id", self.request_id.encode("latin-1"))]
        for name, engine in zip((b"x-pd-prefill-engine", b"x-pd-decode-engine"), engines, strict=True):
            if engine:
                headers.append((name, engine.encode("latin-1")))
        return headers


def _given_trace(headers: Headers) -> TraceContext | None:
    """The client's trace; None where it has none that is valid."""
    given = headers.getlist("traceparent")
    return parse_traceparent(given[0]) if len(given) == 1 else None


def _context_of(span: "Span") -> TraceContext:
    """What goes to the engines as the span above their work."""
    context = span.get_span_context()
    return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", bool(context.trace_flags.sampled))


def _is_plain(label: str) -> bool:
    """Whether a label can stand in a header and in a log line: without control characters, such as U+009B."""
    return len(label) <= MAX_LABEL and label.isascii() and label.isprintable()


async def _stream(fanout: Fanout, model: ServedModel, exchange: _Exchange, pool: TextPool) -> None:
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
    begun = False
    while not fanout.finished:
        batch = fanout.take()
        if not batch:
            await fanout.news()
            continue
        if not begun:
            begun = True
            await exchange.begin_events(fanout.engines)
        if job.params.logprobs is not None and _num_logprobs(batch) > _INLINE_LOGPROBS:
            for delta in batch:
                await exchange.send_events(await pool.encode(functools.partial(encode, delta)))
            continue
        data = encode(batch[0]) if len(batch) == 1 else b"".join(map(encode, batch))
        if data:  # of an answer that is told apart, a token may show nothing yet
            await exchange.send_events(data)
    end = DONE
    if job.include_usage:
        end = encoder.encode_usage(_usage(fanout)) + DONE
    await exchange.end_events(end)


def _num_logprobs(batch: Sequence[ChoiceDelta]) -> int:
    """Tokens whose logprobs a batch shows."""
    return sum(len(delta.logprobs) for delta in batch if delta.logprobs is not None)


async def _reply(fanout: Fanout, model: ServedModel, exchange: _Exchange, pool: TextPool) -> None:
    """Everything at once, when the last choice is finished."""
    job, tokenizer = fanout.job, model.tokenizer
    wholes = [WholeChoice(choice) for choice in fanout.choices]
    while not fanout.finished:
        batch = fanout.take()
        for delta in batch:
            wholes[delta.choice].add(delta)
        if not batch:
            await fanout.news()
    choices: list[Any] = []
    inline = sum(whole.num_logprobs for whole in wholes) <= _INLINE_LOGPROBS
    for whole in wholes:  # one by one: never all of them as objects
        if fanout.aborted:
            raise Disconnected
        encode = functools.partial(whole.encoded, job, tokenizer)
        choices.append(encode() if inline else await pool.encode(encode))
    body: dict[str, Any] = {
        "id": _reply_id(job, exchange),
        "object": "chat.completion" if job.chat else "text_completion",
        "created": exchange.created,
        "model": model.name,
        "choices": choices,
        "usage": _usage(fanout),
    }
    if job.chat:
        extras = functools.partial(prompt_extras, fanout.choices[0], job, tokenizer)
        body |= extras() if inline else await pool.encode(extras)
    await exchange.send_json(200, body, fanout.engines)


def _reply_id(job: Job, exchange: _Exchange) -> str:
    return ("chatcmpl-" if job.chat else "cmpl-") + exchange.reply_id


def _usage(fanout: Fanout) -> dict[str, Any]:
    return usage(
        fanout.num_prompt_tokens,
        fanout.num_completion_tokens,
        fanout.num_cached_tokens,
        fanout.num_reasoning_tokens,
    )


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
            f"x-pd-timeout-s must be a number of seconds above 0, got {clip(text)!r}", param="x-pd-timeout-s"
        )
    return timeout_s
