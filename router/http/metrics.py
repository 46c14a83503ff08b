"""Prometheus metrics of one router: its requests, and the engines as they reported themselves last."""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdkv.router.http.health_metrics import HealthCollector

if TYPE_CHECKING:
    from pdkv.router.dispatch import Dispatcher

Endpoint = Literal["completions", "chat_completions"]

_STEPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BLOCK_CLASSES = ("total", "free", "cached", "active", "leased", "quarantined")
_SOURCES = ("computed", "recomputed", "local_hit", "remote", "store")


class Metrics:
    """What one router counts. Labels come from fixed sets and engine names, never from clients."""

    def __init__(self, dispatcher: "Dispatcher") -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(dispatcher))
        registry.register(HealthCollector(dispatcher))
        self.requests = Counter(
            "pdkv_requests", "Requests by endpoint and how they ended.", ["endpoint", "outcome"], registry=registry
        )
        self.in_flight = 0
        in_flight = Gauge("pdkv_requests_in_flight", "Requests that have not ended.", registry=registry)
        in_flight.set_function(lambda: self.in_flight)
        self.prompt_tokens = Counter("pdkv_prompt_tokens", "Prompt tokens of finished requests.", registry=registry)
        self.cached_tokens = Counter(
            "pdkv_cached_prompt_tokens", "Those of them that were not computed.", registry=registry
        )
        self.generated_tokens = Counter(
            "pdkv_generated_tokens", "Output tokens of finished requests.", registry=registry
        )
        self.first_token = self._histogram("pdkv_time_to_first_token_seconds", "From a request to its first token.", 0)
        self.inter_token = self._histogram(
            "pdkv_inter_token_seconds", "Between two arrivals of one choice's tokens from the engines.", 0
        )
        self.client_stall = self._histogram(
            "pdkv_client_stall_seconds", "Tokens that waited for a client that did not read, 50 ms and more.", 0.025
        )
        self.duration = self._histogram("pdkv_request_seconds", "From a request to its end.", 0.001)

    def _histogram(self, name: str, text: str, shortest_s: float) -> Histogram:
        return Histogram(name, text, registry=self._registry, buckets=[s for s in _STEPS if s > shortest_s])

    def render(self) -> bytes:
        """The exposition text, version 0.0.4."""
        return generate_latest(self._registry)


class RequestMetrics:
    """The lifetime events of one request: latencies are differences of two of them."""

    def __init__(self, metrics: Metrics, endpoint: Endpoint) -> None:
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = time.perf_counter()
        self._first_token_seen = False
        self.inter_token = metrics.inter_token.observe
        self.client_stall = metrics.client_stall.observe
        metrics.in_flight += 1

    def first_token(self, now: float) -> None:
        """A choice's first tokens came from the engines at `now` (time.perf_counter); a request's first count."""
        if not self._first_token_seen:
            self._first_token_seen = True
            self._metrics.first_token.observe(now - self._began)

    def served(self, *, num_prompt_tokens: int, num_cached_tokens: int, num_completion_tokens: int) -> None:
        """All that was asked for is generated."""
        self._metrics.prompt_tokens.inc(num_prompt_tokens)
        self._metrics.cached_tokens.inc(num_cached_tokens)
        self._metrics.generated_tokens.inc(num_completion_tokens)

    def ended(self, outcome: str) -> None:
        """The request is over: "ok", "disconnected" or an error's code."""
        self._metrics.in_flight -= 1
        self._metrics.duration.observe(time.perf_counter() - self._began)
        self._metrics.requests.labels(self._endpoint, outcome).inc()


_CONNECTOR_COUNTERS = {
    "saves": "KV transfers out of the engine that ended well, on each rank.",
    "loads": "KV transfers into the engine that ended well, on each rank.",
    "saved_bytes": "KV that went out, failed transfers included.",
    "loaded_bytes": "KV that came in, failed transfers included.",
    "failed_saves": "KV transfers out of the engine that failed.",
    "failed_loads": "KV transfers into the engine that failed.",
    "failed_lookups": "Questions to a store that failed: taken as misses.",
    "timeouts": "Saves, loads and lookups that were not over by their deadline.",
    "fallbacks": "Loads that another connector took over when this one's failed.",
    "tier_hits": "Values that were read from this tier of a store.",
    "tier_failures": "Calls of this tier that failed, or that it was spared after a failure.",
    "damaged_values": "Stored values that were not what had been saved.",
}
"""Fields of ConnectorStats, and what they count."""


class _EngineCollector(Collector):
    """Reads the dispatcher when it is scraped: engines cost nothing in between."""

    def __init__(self, dispatcher: "Dispatcher") -> None:
        self._dispatcher = dispatcher

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Gauges of the last report, counters since the start of each engine's incarnation."""
        dispatcher = self._dispatcher
        labels = ["engine", "role"]
        up = GaugeMetricFamily("pdkv_engine_up", "Whether the engine is ready.", labels=labels)
        deaths = CounterMetricFamily("pdkv_engine_deaths", "How often the engine was lost.", labels=labels)
        waiting = GaugeMetricFamily("pdkv_engine_waiting", "Requests that wait in the engine.", labels=labels)
        running = GaugeMetricFamily("pdkv_engine_running", "Requests in the engine's batch.", labels=labels)
        blocks = GaugeMetricFamily("pdkv_engine_blocks", "KV blocks by class.", labels=[*labels, "class"])
        sources = CounterMetricFamily(
            "pdkv_engine_prompt_tokens", "Prompt tokens by where their KV came from.", labels=[*labels, "source"]
        )
        received = CounterMetricFamily("pdkv_engine_kv_received_bytes", "KV that came from peers.", labels=labels)
        failures = CounterMetricFamily("pdkv_engine_kv_load_failures", "KV loads that failed.", labels=labels)
        partial = CounterMetricFamily(
            "pdkv_engine_kv_partial_loads", "KV loads that a store could serve only in part.", labels=labels
        )
        damaged = CounterMetricFamily(
            "pdkv_engine_kv_damaged_values",
            "Stored values that were not what had been saved under their keys: counted as misses.",
            labels=labels,
        )
        non_finite = CounterMetricFamily(
            "pdkv_engine_non_finite_requests",
            "Requests that --check-finite ended: the model computed NaN or infinity for them.",
            labels=labels,
        )
        preemptions = CounterMetricFamily("pdkv_engine_preemptions", "Requests taken out of the batch.", labels=labels)
        steps = CounterMetricFamily("pdkv_engine_steps", "Steps of the engine.", labels=labels)
        transfer = CounterMetricFamily("pdkv_engine_kv_transfer_seconds", "Time spent in KV transfers.", labels=labels)
        connectors = {
            field: CounterMetricFamily(f"pdkv_connector_{field}", text, labels=[*labels, "connector"])
            for field, text in _CONNECTOR_COUNTERS.items()
        }
        for engine in dispatcher.engines():
            name = [engine.name, engine.role]
            up.add_metric(name, float(engine.state == "ready"))
            deaths.add_metric(name, engine.num_deaths)
            load = engine.load
            if load is None:
                continue
            waiting.add_metric(name, load.waiting)
            running.add_metric(name, load.running)
            received.add_metric(name, load.bytes_received)
            failures.add_metric(name, load.load_failures)
            partial.add_metric(name, load.partial_loads)
            damaged.add_metric(name, load.damaged_values)
            non_finite.add_metric(name, load.non_finite_requests)
            preemptions.add_metric(name, load.preemptions)
            steps.add_metric(name, load.steps)
            transfer.add_metric(name, load.transfer_seconds)
            for connector, stats in load.connectors.items():
                for field, family in connectors.items():
                    family.add_metric([*name, connector], getattr(stats, field))
            for block_class in _BLOCK_CLASSES:
                blocks.add_metric([*name, block_class], getattr(load.blocks, block_class))
            for source in _SOURCES:
                sources.add_metric([*name, source], getattr(load.sources, source))
        yield from (up, deaths, waiting, running, blocks, sources, received, failures, partial, damaged)
        yield from (non_finite, preemptions, steps, transfer, *connectors.values())
        counters = dispatcher.counters
        yield CounterMetricFamily("pdkv_retries", "Generations begun again elsewhere.", counters.retried)
        yield CounterMetricFamily("pdkv_migrations", "Generations gone on elsewhere, mid-stream.", counters.migrated)
        yield GaugeMetricFamily(
            "pdkv_waiting_for_engines", "Generations that wait for an engine to come back.", dispatcher.num_parked
        )
        yield CounterMetricFamily(
            "pdkv_dropped_messages", "Messages about what had ended.", dispatcher.counters.dropped_messages
        )
