"""The generating endpoints, as bare ASGI: body in, one JSON reply or a stream of events out.

There is no framework between a token and the socket: a response costs one extra task, which waits for the client to
disconnect.
"""

import asyncio
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from pdkv.base.limits import clip
from pdkv.base.trace_context import TraceContext, new_trace, parse_traceparent
from pdkv.errors import InvalidRequest, PdkvError, ServerBusy
from pdkv.router.admission.desk import Asked, Stay, Wishes
from pdkv.router.admission.tenants import TENANT, Tenant, payer
from pdkv.router.http.answer.exchange import Exchange
from pdkv.router.http.answer.fanout import Fanout
from pdkv.router.http.answer.replies import ReplyForms, bytes_per_token, send_reply
from pdkv.router.http.answer.request_report import RequestReport, record
from pdkv.router.http.read.intake import Shared
from pdkv.router.http.read.job import Job
from pdkv.router.http.read.served_model import Cancelled, ServedModel
from pdkv.router.http.read.wishes import read_wishes
from pdkv.router.http.server.access_log import log_access, wants_access_lines
from pdkv.router.http.server.deadline import Deadline
from pdkv.router.http.server.paused_body import ASK
from pdkv.router.http.server.request_body import Disconnected
from pdkv.router.metrics.requests import Endpoint, RequestMetrics

if TYPE_CHECKING:
    from opentelemetry.trace import Span

logger = logging.getLogger(__name__)

Prepare = Callable[[bytes | bytearray, ServedModel, Cancelled, Tenant | None], Job]
"""Turns a body into a checked request; raises InvalidRequest. Runs on any thread."""


SERVER_SEND = "pdkv.send"
"""Where a scope has the server's own `send`: bodies, which no layer looks at, go past those that there are."""


class GenerateEndpoint:
    """An endpoint that generates."""

    def __init__(self, name: Endpoint, prepare: Prepare, forms: ReplyForms, shared: Shared) -> None:
        self._name = name
        self._prepare = prepare
        self._forms = forms
        self._shared = shared
        self._desk = shared.desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._shared.drain.counted():
            await self._handle(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = RequestMetrics(self._shared.metrics, self._name)
        headers, tracer = Headers(scope=scope), self._shared.tracer
        trace = _given_trace(headers)
        span = tracer.begin(trace, metrics.began) if tracer is not None else None
        if span is not None:
            trace = _context_of(span)
        tenant: Tenant | None = scope.get(TENANT)
        send_body, label = scope.get(SERVER_SEND, send), headers.get("x-request-id")
        exchange = Exchange(send, send_body, label, trace or new_trace(), tenant)
        outcome, param = "internal_error", None
        try:
            with await self._desk.receive(scope) as visit:
                exchange.received(scope.get(TENANT), visit.replay)
                outcome = await self._serve(scope, receive, exchange, metrics, visit)
        except Disconnected:
            outcome = "disconnected"
        except PdkvError as error:
            outcome, param = error.code, error.param if isinstance(error, InvalidRequest) else None
            if error.status >= 500 and not isinstance(error, ServerBusy):  # log lines would cost as much work
                logger.warning("request %s failed: %s: %s", exchange.name, error.code, error)
            exchange.received(scope.get(TENANT), None)
            await exchange.fail(error)
        except Exception:  # a defect: the server logs it
            if not exchange.status:
                await exchange.fail(PdkvError("internal error"))
            raise
        finally:
            metrics.ended(outcome)
            if (recorder := self._shared.recorder) is not None:
                payer_digest = tenant.digest if tenant is not None else ""
                begun = exchange.fanout.generations if exchange.fanout is not None else {}
                record(recorder, exchange.job, begun, metrics, outcome, payer_digest)
            if span is not None or wants_access_lines():
                names = {"request_id": exchange.request_id, "trace_id": exchange.trace.trace_id}
                if param is not None:
                    names["param"] = clip(param)
                report = RequestReport(scope, names, exchange.status, outcome, metrics, exchange.fanout)
                log_access(report.access_line())
                if tracer is not None and span is not None:
                    tracer.end(span, report.served())

    async def _serve(
        self, scope: Scope, receive: Receive, exchange: Exchange, metrics: RequestMetrics, visit: Stay
    ) -> str:
        """Serve one request and report how it ended."""
        exchange.check_label()
        wishes = read_wishes(Headers(scope=scope), self._desk.objectives)
        visit.check()
        deadline = Deadline(_client_timeout(Headers(scope=scope)), self._shared.limits.request_timeout_s)
        job, body, gone = await self._receive_job(scope, receive, exchange, deadline, visit)
        model = job.served or self._shared.model()
        metrics.of_pool(job.pool)
        gone.add_done_callback(lambda _: visit.abort())
        try:
            self._check_answer(job)
            exchange.job = job
            job = exchange.job = await self._admit(job, visit, wishes, exchange, body)
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
            serial=exchange.reply_id,
            label=exchange.request_id,
            traceparent=exchange.trace.traceparent,
            pool=self._shared.pool,
        )
        wants_ids = "x-pd-event-ids" in (headers := Headers(scope=scope)) or "last-event-id" in headers
        exchange.may_resume(visit, len(fanout.choices) if job.stream else 0, with_ids=wants_ids)
        gone.add_done_callback(lambda _: fanout.abort())
        scope[ASK] = exchange.ask
        try:
            shared = self._shared
            await send_reply(
                self._forms, fanout, model, exchange, shared.pool, shared.answers, payer(scope),
                shared.limits.stream_ping_s,
            )  # fmt: skip
        except PdkvError as error:
            if fanout.aborted:
                raise Disconnected from error
            _check_grammar_error(error, job)
            raise
        finally:
            del scope[ASK]  # else the two know each other
            gone.cancel()
            fanout.abort()
            visit.used(fanout.num_given_tokens + fanout.num_completion_tokens, fanout.num_cached_tokens)
        metrics.served(
            num_prompt_tokens=fanout.num_prompt_tokens,
            num_cached_tokens=fanout.num_cached_tokens,
            num_completion_tokens=fanout.num_completion_tokens,
            n=job.n,
        )
        return "ok"

    def _check_answer(self, job: Job) -> None:
        """Refuse a whole answer with logprobs that may need more memory than a client can ever hold."""
        logprobs, num_tokens = job.params.logprobs, len(job.prompts) * job.n * (job.params.max_tokens or 0)
        if job.stream or logprobs is None:
            return
        if num_tokens * bytes_per_token(logprobs) > self._shared.answers.limit // 2:
            raise InvalidRequest(
                f"max_tokens: {num_tokens} tokens in all choices with {logprobs} + 1 logprobs each may take more than "
                f"half of {self._shared.answers.limit} bytes (--max-answer-memory): stream them, or ask for fewer",
                param="max_tokens",
            )

    async def _admit(self, job: Job, visit: Stay, wishes: Wishes, exchange: Exchange, body: bytes) -> Job:
        """The request on its tenant's terms. Raises InvalidRequest and TooManyRequests."""
        asked = Asked(
            priority=job.priority,
            wishes=wishes,
            cache_salt=job.cache_salt,
            prompt_lengths=[len(prompt.token_ids) for prompt in job.prompts],
            num_predicted=len(job.prediction_token_ids),
            n=job.n,
            max_tokens=job.params.max_tokens,
            stream=job.stream,
            pool=job.pool,
        )
        terms = await visit.admit(asked, body, exchange.reply_id, exchange.created, exchange.request_id)
        slo = {"slo_ttft_s": wishes.slo_ttft_s, "slo_tpot_s": wishes.slo_tpot_s}
        return msgspec.structs.replace(job, **terms._asdict(), **slo)

    async def _receive_job(
        self, scope: Scope, receive: Receive, exchange: Exchange, deadline: Deadline, visit: Stay
    ) -> tuple[Job, bytes, "asyncio.Task[None]"]:
        """The checked request, its body if it is to be kept, and the task that ends when the client goes away."""
        replay, kept = visit.replay, b""
        tenant: Tenant | None = scope.get(TENANT)
        model: ServedModel

        def prepare(body: bytes | bytearray, cancelled: Cancelled) -> Job:
            nonlocal kept
            body = body if replay is None else replay.body
            job = self._prepare(body, model, cancelled, tenant)
            if replay is not None and job.pool != replay.pool:
                raise InvalidRequest("the model that began this answer cannot read its request any more", status=404)
            kept = bytes(body) if visit.resume_id and job.stream else b""
            return job

        def on_body() -> None:
            nonlocal model
            exchange.body_is_here = True
            visit.check()  # again: the queue may be full by now, and nothing should be tokenized in vain
            model = self._shared.model()  # now: pools may have come and gone while the body was read
            if replay is not None:
                model = model.taken_up(replay.pool)

        def holds(job: Job) -> bool:
            return replay is not None or job.split is None or job.pool not in self._shared.model().down

        job, gone = await self._shared.intake.read(
            scope, receive, prepare, deadline, request_id=exchange.request_id, on_body=on_body, holds=holds
        )
        return job, kept, gone


def _given_trace(headers: Headers) -> TraceContext | None:
    """The client's trace; None if it sent no valid one."""
    given = headers.getlist("traceparent")
    return parse_traceparent(given[0]) if len(given) == 1 else None


def _context_of(span: "Span") -> TraceContext:
    """The trace context sent to engines, of the span above their work."""
    context = span.get_span_context()
    return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", bool(context.trace_flags.sampled))


def _check_grammar_error(error: PdkvError, job: Job) -> None:
    """Raise InvalidRequest for a grammar that an engine refused, naming the field that asked for it."""
    if isinstance(error, InvalidRequest) and error.param == "structured_outputs" and job.grammar_param:
        raise type(error)(f"{job.grammar_param}: {error}", param=job.grammar_param) from None


def _client_timeout(headers: Headers) -> float:
    """Seconds after which the client wants its request to fail; infinite if it does not say."""
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
