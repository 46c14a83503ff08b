"""Spans as a collector gets them, of requests through a real dispatcher over scripted engines."""

import asyncio
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from asgi_client import call
from dispatch_rig import System, live
from otlp_receiver import OtlpReceiver, attributes_of
from small_app import MODEL, served

from pdkv.config import ObservabilityConfig
from pdkv.errors import ConfigError
from pdkv.router.http.app import create_app
from pdkv.router.metrics.tracing import MAX_GENERATIONS, Tracer, check_tracing, traces_url
from pdkv.wire.messages import Failed

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "client-7"}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    pytest.importorskip("opentelemetry.sdk.trace")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr("pdkv.router.metrics.tracing.CLOSE_S", 20.0)
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


async def ask(system: System, tracer: Tracer, *bodies: dict[str, Any], headers: dict[str, str] | None = None) -> None:
    """Requests to a router that traces; returns when the collector has had its say."""
    app = create_app(system.dispatcher, served(), tracer=tracer)
    for body in bodies:
        await call(app, "POST", "/v1/completions", {"model": MODEL, "max_tokens": 4, **body}, headers)
    await asyncio.to_thread(tracer.close)


def by_name(receiver: OtlpReceiver) -> dict[str, Any]:
    """The spans, each name once."""
    names = [span.name for span in receiver.spans]
    assert len(set(names)) == len(names)
    return dict(zip(names, receiver.spans, strict=True))


async def test_router_prefill_transfer_and_decode_under_the_clients_span(receiver: OtlpReceiver) -> None:
    async with live(System(1, 1)) as system:
        tracer = Tracer(receiver.endpoint)
        await ask(system, tracer, {"prompt": list(range(5, 30))}, headers=SAMPLED)
        spans = by_name(receiver)
        assert set(spans) == {"pdkv.request", "pdkv.router", "pdkv.prefill", "pdkv.transfer", "pdkv.decode"}
        root = spans.pop("pdkv.request")
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.kind) == (TRACE, PARENT, root.SPAN_KIND_SERVER)
        for span in spans.values():
            assert (span.trace_id, span.parent_span_id) == (root.trace_id, root.span_id)
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= root.end_time_unix_nano
        order = [spans[f"pdkv.{name}"] for name in ("router", "prefill", "decode")]
        assert [s.name for s in sorted(order, key=lambda s: s.start_time_unix_nano)] == [s.name for s in order]
        assert [event.name for event in root.events] == ["first_token"]
        said = attributes_of(root)
        assert said["gen_ai.request.id"] == "client-7"
        assert (said["gen_ai.usage.prompt_tokens"], said["http.response.status_code"]) == (25, 200)
        assert (said["pdkv.prefill"], said["pdkv.decode"], said["pdkv.outcome"]) == ("prefill-0", "decode-0", "ok")
        assert attributes_of(spans["pdkv.prefill"])["pdkv.engine"] == "prefill-0"
        assert attributes_of(spans["pdkv.decode"])["pdkv.outcome"] in ("length", "stop")
        transfer = attributes_of(spans["pdkv.transfer"])
        assert (transfer["pdkv.source"], transfer["pdkv.engine"]) == ("prefill-0", "decode-0")
        assert receiver.paths == ["/v1/traces"]
        assert receiver.resources[0]["service.name"] == "pdkv"
        assert tracer.counts == {"sent": 5, "lost": 0}
        engines = [message for backend in system.backends.values() for message in backend.engine.received]
        names = {message.traceparent for message in engines if hasattr(message, "traceparent")}
        assert names == {f"00-{TRACE}-{root.span_id.hex()}-01"}


async def test_who_wants_no_trace_gets_none_and_who_has_none_gets_a_new_one(receiver: OtlpReceiver) -> None:
    async with live(System(1, 1)) as system:
        tracer = Tracer(receiver.endpoint)
        await ask(system, tracer, {"prompt": [5] * 20}, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        assert receiver.spans == []
        tracer = Tracer(receiver.endpoint)
        await ask(system, tracer, {"prompt": [5] * 20}, headers={"traceparent": "garbage"})
        root = by_name(receiver)["pdkv.request"]
        assert root.parent_span_id == b""
        assert root.trace_id.hex() != TRACE


async def test_a_retry_shows_both_attempts_and_an_error_is_one(receiver: OtlpReceiver) -> None:
    async with live(System(2, 1)) as system:
        tracer = Tracer(receiver.endpoint)
        for backend in system.backends.values():
            backend.held = True

        async def kill() -> None:
            first, second = system.backends["prefill-0"], system.backends["prefill-1"]
            while not first.engine.tasks:
                await asyncio.sleep(0)
            first.die()
            while not second.engine.tasks:
                await asyncio.sleep(0)
            [(request_id, attempt)] = second.engine.tasks
            second.engine.tasks.clear()
            second.say(Failed(request_id, attempt, "kv_corrupted", "it does not work", False))

        killer = asyncio.ensure_future(kill())
        await ask(system, tracer, {"prompt": [5] * 20})
        await killer
        legs = [attributes_of(span) for span in receiver.spans if span.name == "pdkv.prefill"]
        assert sorted((leg["pdkv.engine"], leg["pdkv.attempt"]) for leg in legs) == [("prefill-0", 0), ("prefill-1", 1)]
        (root,) = [span for span in receiver.spans if span.name == "pdkv.request"]
        assert root.status.code == root.status.STATUS_CODE_ERROR
        assert attributes_of(root)["pdkv.outcome"] == "kv_corrupted"


async def test_an_aggregated_engine_has_both_phases_and_choices_are_bounded(receiver: OtlpReceiver) -> None:
    async with live(System(0, 1)) as system:
        tracer = Tracer(receiver.endpoint)
        await ask(system, tracer, {"prompt": [5] * 20, "n": 3 * MAX_GENERATIONS})
        names = [span.name for span in receiver.spans]
        assert names.count("pdkv.decode") == names.count("pdkv.prefill") == MAX_GENERATIONS
        assert "pdkv.transfer" not in names


@pytest.mark.parametrize("how", ["refuses", "gone"])
async def test_a_collector_that_does_not_take_spans_harms_nothing(
    receiver: OtlpReceiver, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with live(System(1, 1)) as system:
        receiver.status = 400
        tracer = Tracer(receiver.endpoint if how == "refuses" else "http://127.0.0.1:1")
        with caplog.at_level(logging.WARNING):
            await ask(system, tracer, {"prompt": [5] * 20}, {"prompt": [6] * 20})
        said = [record.message for record in caplog.records if "spans are lost" in record.message]
        assert len(said) <= 1
        assert tracer.counts["sent"] == 0
        assert system.dispatcher.counters.finished == 2
        assert "Traceback" not in caplog.text


def test_urls() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"


@pytest.mark.parametrize("url", ["c:4318", "grpc://c:4317", "http://", "http://c:x", "http://user:pw@c:4318"])
def test_a_wrong_endpoint_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint must") as caught:
        ObservabilityConfig(otlp_endpoint=url)
    assert "pw" not in str(caught.value)


def test_without_the_sdk_the_option_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("opentelemetry", "opentelemetry.sdk.trace"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'pdkv\[otel\]'"):
        check_tracing()


def test_by_default_there_is_nothing() -> None:
    config = ObservabilityConfig()
    assert (config.otlp_endpoint, config.loop_watchdog_ms) == (None, 0.0)
