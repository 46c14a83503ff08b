"""OpenTelemetry spans of requests: router, prefill, transfer, decode.

The router makes all of them, at the end of a request, from times that are recorded anyway and from engines' reports; a
thread of the SDK sends them. So an engine needs no exporter, and a request that is not sampled costs nothing. The SDK
is an extra: `pdkv[otel]`.
"""

import importlib.util
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pdkv.base.clock import MONOTONIC, unix_time_ns
from pdkv.base.log_limit import LogLimit
from pdkv.base.trace_context import TraceContext
from pdkv.base.version import VERSION
from pdkv.errors import ConfigError
from pdkv.router.generations.generation import Generation
from pdkv.router.generations.timeline import Leg

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

EXPORT_TIMEOUT_S = 5.0
"""Seconds for one export to the collector, including retries."""

CLOSE_S = 1.0
"""Seconds for the last spans to be sent when the router ends."""

MAX_GENERATIONS = 16
"""The most choices of one request that get their own spans."""

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")

logger = logging.getLogger(__name__)

Attributes = Mapping[str, str | bool | int | float]


class Served(NamedTuple):
    """The facts for a request's spans. All times are CLOCK_MONOTONIC's: the clock of pdkv.base.clock."""

    began: float
    dispatched: float  # 0: it was not dispatched
    first_token: float  # 0: there was none
    ended: float
    failed: bool  # by the server's fault
    attributes: Attributes
    generations: Sequence[Generation]


def check_tracing() -> None:
    """Raise ConfigError if the SDK is not installed."""
    try:
        missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:
        missing = list(_NEEDED)
    if missing:
        raise ConfigError("--otlp-endpoint needs the OpenTelemetry SDK: pip install 'pdkv[otel]'")


class Tracer:
    """Makes spans and sends them, in batches, to one collector by OTLP over HTTP with protobuf.

    The SDK's own variables apply (OTEL_EXPORTER_OTLP_HEADERS, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER, OTEL_BSP_*, …).
    """

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: http(s)://HOST:PORT, to which /v1/traces is added, or a whole URL. Raises ConfigError."""
        check_tracing()
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = _Exporter(OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=EXPORT_TIMEOUT_S))
        resource = {SERVICE_VERSION: VERSION, SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "pdkv")}
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", self._exporter)))
        self._tracer = self._provider.get_tracer("pdkv", VERSION)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of spans that were sent and lost."""
        return {"sent": self._exporter.num_sent, "lost": self._exporter.num_lost}

    def begin(self, parent: TraceContext | None, began: float) -> "Span":
        """The span of a request that arrived with this trace, or without one. `end` ends it."""
        from opentelemetry import trace

        context = None
        if parent is not None:
            flags = trace.TraceFlags(trace.TraceFlags.SAMPLED if parent.sampled else trace.TraceFlags.DEFAULT)
            remote = trace.SpanContext(int(parent.trace_id, 16), int(parent.parent_id, 16), True, flags)
            context = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        start = unix_time_ns() - int(MONOTONIC.now() * 1e9) + int(began * 1e9)
        kind = trace.SpanKind.SERVER
        span: Span = self._tracer.start_span("pdkv.request", context, kind=kind, start_time=start)
        return span

    def end(self, span: "Span", served: Served) -> None:
        """End a request's span and those below it."""
        begun_ns = getattr(span, "start_time", None)  # the SDK's; unsampled spans have none
        if begun_ns is None:
            return
        from opentelemetry import trace

        offset = begun_ns - int(served.began * 1e9)  # one reading of the clocks serves all spans
        context = trace.set_span_in_context(span)
        self._child("pdkv.router", context, offset, served.began, served.dispatched or served.ended, {})
        for generation in served.generations[:MAX_GENERATIONS]:
            self._generation(context, generation, offset)
        if served.first_token:
            span.add_event("first_token", timestamp=offset + int(served.first_token * 1e9))
        span.set_attributes(served.attributes)
        if served.failed:
            span.set_status(trace.StatusCode.ERROR)
        span.end(offset + int(served.ended * 1e9))

    def close(self) -> None:
        """Send the remaining spans, for CLOSE_S at most. Idempotent."""
        thread = threading.Thread(target=self._provider.shutdown, name="pdkv-otel-close", daemon=True)
        thread.start()
        thread.join(CLOSE_S)

    def _generation(self, context: "Context", generation: Generation, offset: int) -> None:
        timeline = generation.timeline
        choice: dict[str, Any] = {
            "pdkv.choice": generation.choice,
            "pdkv.generation_id": generation.request_id,
        }
        ended = timeline.ended if timeline.ended is not None else MONOTONIC.now()
        for leg in timeline.legs:
            for name, start, stop in _phases(leg, timeline.first_token, ended):
                self._child(name, context, offset, start, stop, choice | _leg_attributes(leg))
        for transfer in timeline.transfers:
            attributes: dict[str, Any] = {
                "pdkv.source": transfer.source,
                "pdkv.engine": transfer.target,
                "pdkv.attempt": transfer.attempt,
                "pdkv.bytes": transfer.num_bytes,
                "pdkv.outcome": transfer.code or "ok",
            }
            start = transfer.ended - transfer.seconds
            self._child("pdkv.transfer", context, offset, start, transfer.ended, choice | attributes)

    def _child(
        self, name: str, context: "Context", offset: int, start: float, stop: float, attributes: Attributes
    ) -> None:
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=offset + int(start * 1e9))
        span.end(offset + int(stop * 1e9))


class _Exporter:
    """Wraps the SDK's exporter: counts spans, and logs now and then that the collector cannot be reached.

    The SDK itself would log every failed batch with a traceback.
    """

    def __init__(self, exporter: Any) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self.num_sent = self.num_lost = 0
        self._exporter = exporter
        self._log_limit = LogLimit(60.0)

    def export(self, spans: Sequence["ReadableSpan"]) -> Any:
        """Export a batch; called on the SDK's thread."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            result, why = self._exporter.export(spans), "the collector refused the spans"
        except Exception as error:
            result, why = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        if result is SpanExportResult.SUCCESS:
            self.num_sent += len(spans)
            return result
        self.num_lost += len(spans)
        if self._log_limit.passes():
            logger.warning("%d spans are lost (%d so far): %s", len(spans), self.num_lost, why)
        return result

    def shutdown(self) -> None:
        """Idempotent."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nothing is buffered here."""
        return True


def traces_url(endpoint: str) -> str:
    """The complete URL for an endpoint."""
    host = endpoint.partition("://")[2]
    return f"{endpoint.rstrip('/')}/v1/traces" if "/" not in host.rstrip("/") else endpoint


def _phases(leg: Leg, first_token: float | None, ended: float) -> Iterable[tuple[str, float, float]]:
    """Names, starts and ends of a leg's spans."""
    stop = leg.ended if leg.ended is not None else ended
    if leg.part != "all":
        return [(f"pdkv.{leg.part}", leg.began, stop)]
    if first_token is None or not leg.began <= first_token <= stop:
        return [("pdkv.prefill", leg.began, stop)]
    return [("pdkv.prefill", leg.began, first_token), ("pdkv.decode", first_token, stop)]


def _leg_attributes(leg: Leg) -> dict[str, str | int | float]:
    return {
        "pdkv.engine": leg.engine,
        "pdkv.attempt": leg.attempt,
        "pdkv.outcome": leg.outcome or "not_heard",
        "pdkv.queued_s": leg.queued_s,
        "pdkv.ran_s": leg.ran_s,
    }
