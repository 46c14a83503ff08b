"""What /metrics says."""

import asyncio
import itertools
import time

import msgspec
import pytest
from asgi_client import begin, call
from coroutines import run
from fake_dispatcher import FakeDispatcher, say, tokens
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.parser import text_string_to_metric_families
from small_app import MODEL, ids, make_app
from starlette.types import ASGIApp
from wire_rig import make_card

from pdkv.errors import EngineDied, RequestFailed
from pdkv.router.admission.tenants import Grant, Tenant
from pdkv.router.engines.state import EngineState
from pdkv.router.metrics import requests as metrics_module
from pdkv.router.metrics.extras import key_metrics
from pdkv.router.metrics.requests import MAX_OUTCOMES, Metrics
from pdkv.wire.reports import BlockCounts, ConnectorStats, LoadReport
from pdkv.wire.tiers import TierEvents

Samples = dict[tuple[str, ...], float]


async def scrape(app: ASGIApp) -> Samples:
    """(name, label value, …) in the order of the label names → value."""
    reply = await call(app, "GET", "/metrics")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    names = []
    for family in text_string_to_metric_families(reply.body.decode()):
        names.append(family.name)
        for sample in family.samples:
            key = (sample.name, *(sample.labels[name] for name in sorted(sample.labels)))
            assert key not in samples, f"{key} is there twice"
            samples[key] = sample.value
    assert len(names) == len(set(names)), "a family is there twice"
    return samples


async def test_requests_by_outcome_and_tokens() -> None:
    dispatcher = FakeDispatcher(say(ids("abc")))
    dispatcher.num_cached_tokens = 2
    app = make_app(dispatcher)
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5, 6, 7]})
    await call(app, "POST", "/v1/completions", {"model": "unknown-name", "prompt": "x"})
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": ""})
    dispatcher.answer = lambda _: [EngineDied("dead", request_id="r")]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    await call(app, "POST", "/v1/chat/completions", body)
    dispatcher.answer = None
    exchange, task = begin(app, "POST", "/v1/completions", {"model": MODEL, "prompt": "x", "stream": True})
    generation = await dispatcher.next_generation(2)
    assert (await scrape(app))[("pdkv_requests_in_flight",)] == 1
    generation.put(tokens(*ids("a")))
    await exchange.wait_for_writes(1)
    exchange.disconnect()
    await task
    samples = await scrape(app)
    outcomes = {key[1:]: value for key, value in samples.items() if key[0] == "pdkv_requests_total"}
    assert outcomes == {
        ("completions", "ok"): 1,
        ("completions", "model_not_found"): 1,
        ("completions", "invalid_request_error"): 1,
        ("chat_completions", "engine_died"): 1,
        ("completions", "disconnected"): 1,
    }
    assert samples[("pdkv_requests_in_flight",)] == 0
    assert samples[("pdkv_prompt_tokens_total",)] == 3
    assert samples[("pdkv_cached_prompt_tokens_total",)] == 2
    assert samples[("pdkv_generated_tokens_total",)] == 3
    assert samples[("pdkv_time_to_first_token_seconds_count",)] == 2
    assert samples[("pdkv_inter_token_seconds_count",)] == 2
    assert samples[("pdkv_request_seconds_count",)] == 5
    assert not any("unknown-name" in value for key in samples for value in key)


def test_engines_as_they_reported_themselves() -> None:
    samples = run(scrape(make_app(FakeDispatcher())))
    engine = ("decode-1", "decode")
    assert samples[("pdkv_engine_up", *engine)] == 1
    assert samples[("pdkv_engine_up", "prefill-0", "prefill")] == 0
    assert samples[("pdkv_engine_deaths_total", "prefill-0", "prefill")] == 1
    assert samples[("pdkv_engine_waiting", *engine)] == 1
    assert samples[("pdkv_engine_running", *engine)] == 2
    classes = {key[1]: value for key, value in samples.items() if key[0] == "pdkv_engine_blocks"}
    assert classes == {"total": 10, "free": 4, "cached": 3, "active": 2, "leased": 1, "quarantined": 0}
    assert samples[("pdkv_engine_prompt_tokens_total", *engine, "computed")] == 5
    assert samples[("pdkv_engine_prompt_tokens_total", *engine, "local_hit")] == 7
    assert samples[("pdkv_engine_kv_received_bytes_total", *engine)] == 4096
    assert samples[("pdkv_engine_preemptions_total", *engine)] == 6
    assert samples[("pdkv_engine_non_finite_requests_total", *engine)] == 8
    assert samples[("pdkv_engine_kv_damaged_values_total", *engine)] == 8
    assert samples[("pdkv_engine_kv_partial_loads_total", *engine)] == 9
    assert samples[("pdkv_retries_total",)] == 2
    assert samples[("pdkv_migrations_total",)] == 1
    assert samples[("pdkv_waiting_for_engines",)] == 0
    assert samples[("pdkv_generations_total", "timeout")] == 4
    lost = ("prefill-0", "prefill")
    assert samples[("pdkv_engine_in_flight", *lost)] == 3
    assert samples[("pdkv_engine_busy_seconds", *lost)] == 0
    assert samples[("pdkv_engine_busy_seconds", *engine)] == 1.5
    assert samples[("pdkv_engine_indexed_keys", *lost)] == 1
    assert samples[("pdkv_engine_malformed_messages_total", *lost)] == 21


def test_tiers_below_the_caches_are_shown_with_their_keys() -> None:
    dispatcher = FakeDispatcher()
    dispatcher.tiers.add_engine("a")
    dispatcher.tiers.apply("a", TierEvents("disk", True, 64, stored=[b"k", b"l"]))
    dispatcher.tiers.apply("a", TierEvents("memory", False, 64, stored=[b"k"]))
    dispatcher.tiers.apply("a", TierEvents("disk", True, 32))
    samples = run(scrape(make_app(dispatcher)))
    assert {key[1:]: value for key, value in samples.items() if key[0] == "pdkv_tier_keys"} == {
        ("", "disk"): 2,
        ("a", "memory"): 1,
    }
    assert samples[("pdkv_refused_tier_events_total",)] == 1


async def test_vllms_names_say_what_vllm_means_by_them() -> None:
    dispatcher = FakeDispatcher(say(ids("abcd")))
    dispatcher.num_cached_tokens = 2
    app = make_app(dispatcher)
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5, 6, 7], "n": 2})
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2})
    dispatcher.answer = lambda _: [EngineDied("dead", request_id="r")]
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5], "n": 3})
    dispatcher.delays.queue.observe(0.4)
    samples = await scrape(app)
    router = ("router", MODEL)
    reasons = {key[2]: value for key, value in samples.items() if key[0] == "vllm:request_success_total"}
    assert reasons == {"stop": 2, "length": 1, "abort": 0, "error": 3, "repetition": 0}
    assert samples[("vllm:prompt_tokens_total", *router)] == samples[("pdkv_prompt_tokens_total",)] == 6
    assert samples[("vllm:generation_tokens_total", *router)] == samples[("pdkv_generated_tokens_total",)] == 10
    assert samples[("vllm:time_to_first_token_seconds_count", *router)] == 2
    assert samples[("vllm:inter_token_latency_seconds_count", *router)] == 7
    assert samples[("vllm:e2e_request_latency_seconds_count", *router)] == 3
    assert samples[("vllm:request_time_per_output_token_seconds_count", *router)] == 2
    assert samples[("vllm:request_prompt_tokens_bucket", "router", "2.0", MODEL)] == 0
    assert samples[("vllm:request_prompt_tokens_bucket", "router", "5.0", MODEL)] == 2
    assert samples[("vllm:request_params_n_bucket", "router", "1.0", MODEL)] == 1
    assert samples[("vllm:request_queue_time_seconds_bucket", "router", "0.3", MODEL)] == 0
    assert samples[("vllm:request_queue_time_seconds_bucket", "router", "0.5", MODEL)] == 1
    engine = ("decode-1", MODEL)
    assert samples[("vllm:num_requests_running", *engine)] == 2
    assert samples[("vllm:num_requests_waiting", *engine)] == 1
    assert samples[("vllm:kv_cache_usage_perc", *engine)] == 1 - 7 / 10
    assert samples[("vllm:num_preemptions_total", *engine)] == 6
    assert samples[("vllm:prefix_cache_queries_total", *engine)] == 12
    assert samples[("vllm:prefix_cache_hits_total", *engine)] == 7
    assert samples[("vllm:external_prefix_cache_queries_total", *engine)] == 5
    assert samples[("vllm:external_prefix_cache_hits_total", *engine)] == 0


async def test_a_gateway_s_endpoint_picker_finds_the_size_of_each_pool() -> None:
    dispatcher = FakeDispatcher()
    card = make_card()
    foreign = msgspec.structs.replace(card, engine="vllm-0", backend="vllm")  # whose pool is not known
    blocks = BlockCounts(total=10, free=10, cached=0, active=0, leased=0, quarantined=0)
    load = LoadReport(waiting=0, running=0, blocks=blocks)
    engines = [EngineState(c.engine, "decode", "ready", card=c, load=load) for c in (card, foreign)]
    dispatcher.engines = lambda: engines  # type: ignore[method-assign]
    samples = await scrape(make_app(dispatcher))
    sizes = str(card.layout.block_size), card.engine, MODEL, str(card.num_blocks)
    assert {key[1:]: value for key, value in samples.items() if key[0] == "vllm:cache_config_info"} == {sizes: 1}
    of_pools = [key for key in samples if key[0] in ("vllm:kv_cache_usage_perc", "pdkv_engine_blocks")]
    assert len(of_pools) == 7
    assert all(card.engine in key for key in of_pools)


async def test_one_observation_stands_in_both_histograms_of_a_pair() -> None:
    app = make_app(FakeDispatcher(say(ids("ab"))))
    await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5, 6, 7]})
    samples = await scrape(app)
    for ours, theirs in (
        ("pdkv_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("pdkv_inter_token_seconds", "vllm:inter_token_latency_seconds"),
        ("pdkv_request_seconds", "vllm:e2e_request_latency_seconds"),
    ):
        assert samples[(f"{ours}_sum",)] == samples[(f"{theirs}_sum", "router", MODEL)] > 0
        for name, labels in ((ours, ()), (theirs, ("router", MODEL))):
            counts = [v for key, v in samples.items() if key[0] == f"{name}_bucket"]
            assert counts == sorted(counts), "buckets are cumulative, in the order of their bounds"
            assert counts[-1] == samples[(f"{name}_count", *labels)] == 1


def test_an_engine_may_name_any_error_and_yet_labels_are_bounded() -> None:
    async def main() -> None:
        dispatcher = FakeDispatcher()
        numbers = itertools.count()

        def fail(_: object) -> list[Exception]:
            error = RequestFailed("x", request_id="r")
            error.code = f"code-{next(numbers)}"
            return [error]

        dispatcher.answer = fail
        app = make_app(dispatcher)
        for _ in range(MAX_OUTCOMES + 10):
            await call(app, "POST", "/v1/completions", {"model": MODEL, "prompt": [5]})
        outcomes = {key: v for key, v in (await scrape(app)).items() if key[0] == "pdkv_requests_total"}
        assert len(outcomes) == MAX_OUTCOMES + 1
        assert outcomes[("pdkv_requests_total", "completions", "other")] == 10

    run(main())


def test_what_the_router_thinks_of_its_engines() -> None:
    samples = run(scrape(make_app(FakeDispatcher())))
    assert samples[("pdkv_engine_suspect", "decode-1", "decode")] == 1
    assert samples[("pdkv_engine_suspect", "prefill-0", "prefill")] == 0
    assert samples[("pdkv_engine_ejected", "decode-1", "decode")] == 0
    assert samples[("pdkv_engine_ejected", "prefill-0", "prefill")] == 1
    assert samples[("pdkv_bad_pairs",)] == 4
    assert (samples[("pdkv_probes_total", "ok")], samples[("pdkv_probes_total", "failed")]) == (5, 6)
    assert samples[("pdkv_moves_total",)] == 7


def test_connectors_by_their_names_and_parts() -> None:
    samples = run(scrape(make_app(FakeDispatcher())))
    counts = {key[0]: value for key, value in samples.items() if key[1:] == ("multi/0-p2p", "decode-1", "decode")}
    assert counts == {
        f"pdkv_connector_{name}_total": 0.0
        for name in ConnectorStats.__struct_fields__
        if name not in ("paths", "held")
    } | {
        "pdkv_connector_saves_total": 11,
        "pdkv_connector_loads_total": 12,
        "pdkv_connector_saved_bytes_total": 13,
        "pdkv_connector_timeouts_total": 14,
        "pdkv_connector_fallbacks_total": 15,
    }
    store = ("multi/1-store", "decode-1", "decode")
    assert samples[("pdkv_connector_load_seconds_total", *store)] == 8
    assert samples[("pdkv_connector_hidden_load_seconds_total", *store)] == 6
    tier = ("multi/1-store/0-redis", "decode-1", "decode")
    assert samples[("pdkv_connector_tier_hits_total", *tier)] == 16
    assert samples[("pdkv_connector_tier_failures_total", *tier)] == 17
    assert ("pdkv_tier_bytes", *tier) not in samples, "it does not know"
    host = ("multi/1-store/0-host", "decode-1", "decode")
    assert samples[("pdkv_tier_values", *host)] == 18
    assert samples[("pdkv_tier_bytes", *host)] == 19 << 20
    assert samples[("pdkv_tier_capacity_bytes", *host)] == 20 << 20
    assert samples[("pdkv_tier_evictions_total", *host)] == 21


async def test_what_requests_hold_is_there_while_they_run_and_zero_afterwards() -> None:
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher)
    names: tuple[str, ...] = ("pdkv_open_requests", "pdkv_open_generations", "pdkv_requests_in_flight")
    _, task = begin(app, "POST", "/v1/completions", {"prompt": "x"})
    generation = await dispatcher.next_generation(0)
    samples = await scrape(app)
    assert [samples[(name,)] for name in names] == [1, 1, 1]
    generation.put(tokens(*ids("a"), end="stop"))
    await task
    samples = await scrape(app)
    names += ("pdkv_body_bytes", "pdkv_waiting_bodies", "pdkv_text_bytes")
    assert [samples[(name,)] for name in names] == [0] * 6


async def test_latencies_are_those_of_the_engines_and_a_clients_stall_is_counted_apart() -> None:
    dispatcher = FakeDispatcher()
    app = make_app(dispatcher)
    _, task = begin(app, "POST", "/v1/completions", {"prompt": "x", "stream": True})
    generation = await dispatcher.next_generation(0)
    later = time.perf_counter() + 100.0
    for at in (later, later + 0.25, later + 0.5):
        generation.put(tokens(*ids("a")), at=at)
    generation.put(tokens(*ids("a"), end="stop"), at=later + 0.75)
    await task
    samples = await scrape(app)
    assert 95.0 < samples[("pdkv_time_to_first_token_seconds_sum",)] < 105.0
    assert samples[("pdkv_inter_token_seconds_count",)] == 3
    assert samples[("pdkv_inter_token_seconds_sum",)] == pytest.approx(0.75)
    assert samples[("pdkv_client_stall_seconds_count",)] == 0
    _, task = begin(app, "POST", "/v1/completions", {"prompt": "x", "stream": True})
    (await dispatcher.next_generation(1)).put(tokens(*ids("a"), end="stop"), at=time.perf_counter() - 5.0)
    await task
    samples = await scrape(app)
    assert samples[("pdkv_client_stall_seconds_count",)] == 1
    assert 5.0 <= samples[("pdkv_client_stall_seconds_sum",)] < 35.0


def test_others_have_their_turn_while_a_thousand_keys_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No piece of text between two turns is longer than a family of the keys, and the whole is what it always was."""
    tenants = [Tenant(f"key-{number}", Grant(), time.monotonic) for number in range(1000)]
    metrics = Metrics(FakeDispatcher())
    metrics.register(lambda: key_metrics(tenants))
    sizes = []

    async def main() -> bytes:
        generate = exposition.generate_latest
        made = 0

        def counted(registry: CollectorRegistry) -> bytes:
            nonlocal made
            text = generate(registry)
            made += len(text)
            return text

        monkeypatch.setattr(metrics_module, "generate_latest", counted)

        def turn() -> None:
            nonlocal handle, made
            sizes.append(made)
            made = 0
            handle = asyncio.get_running_loop().call_soon(turn)

        handle = asyncio.get_running_loop().call_soon(turn)
        text = await metrics.render()
        handle.cancel()
        return text

    text = asyncio.run(main())
    assert len(sizes) >= 6
    assert max(sizes) < len(text) / 3
    assert text.count(b"\npdkv_key_tokens_total{") == 1000
    at_once = exposition.generate_latest(metrics._registry)
    assert [line.split()[0] for line in text.splitlines()] == [line.split()[0] for line in at_once.splitlines()]
