"""Prometheus metrics of the engines as they reported themselves last, under pdkv's names and under vLLM's."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdkv.router.engines.fleet import EngineSnapshot
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.messages import LoadReport

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

_BLOCK_CLASSES = ("total", "free", "cached", "active", "leased", "quarantined")
_SOURCES = ("computed", "recomputed", "local_hit", "remote", "store")

_LOAD_GAUGES = {
    "waiting": ("waiting", "Requests that wait in the engine."),
    "running": ("running", "Requests in the engine's batch."),
}
_LOAD_COUNTERS = {
    "bytes_received": ("kv_received_bytes", "KV that came from peers."),
    "load_failures": ("kv_load_failures", "KV loads that failed."),
    "partial_loads": ("kv_partial_loads", "KV loads that a store could serve only in part."),
    "damaged_values": (
        "kv_damaged_values",
        "Stored values that were not what had been saved under their keys: counted as misses.",
    ),
    "non_finite_requests": (
        "non_finite_requests",
        "Requests that --check-finite ended: the model computed NaN or infinity for them.",
    ),
    "preemptions": ("preemptions", "Requests taken out of the batch."),
    "steps": ("steps", "Steps of the engine."),
    "transfer_seconds": ("kv_transfer_seconds", "Time spent in KV transfers."),
    "dropped_messages": ("dropped_messages", "Messages that the engine dropped: about what had ended, or not for it."),
}
"""Fields of LoadReport: the metric's name behind pdkv_engine_, and what it says."""

_CONNECTOR_COUNTERS = {
    "saves": "KV transfers out of the engine that ended well, on each rank.",
    "loads": "KV transfers into the engine that ended well, on each rank.",
    "saved_bytes": "KV that went out, failed transfers included.",
    "loaded_bytes": "KV that came in, failed transfers included.",
    "failed_saves": "KV transfers out of the engine that failed.",
    "failed_loads": "KV transfers into the engine that failed.",
    "late_saves": "Values that were not saved: too much was on its way before their blocks had other content.",
    "failed_lookups": "Questions to a store that failed: taken as misses.",
    "timeouts": "Saves, loads and lookups that were not over by their deadline.",
    "fallbacks": "Loads that another connector took over when this one's failed.",
    "tier_hits": "Values that were read from this tier of a store.",
    "tier_failures": "Calls of this tier that failed, or that it was spared after a failure.",
    "read_bytes": "Bytes of values that were found in a store, or in this tier of one.",
    "read_seconds": "Seconds in which a rank was reading there.",
    "damaged_values": "Stored values that were not what had been saved.",
    "corrupted_transfers": "KV transfers that failed because what arrived was not what the peer had.",
    "load_seconds": "Seconds that threads of a store's connector spent on loads.",
    "hidden_load_seconds": "Of load_seconds, those in which the engine computed and did not wait for the load.",
    "save_seconds": "Seconds that threads of a store's connector spent on saves.",
    "hidden_save_seconds": "Of save_seconds, those in which the engine computed.",
}
"""Fields of ConnectorStats, and what they count."""


class EngineCollector(Collector):
    """Reads the dispatcher when it is scraped: engines cost nothing in between."""

    def __init__(self, dispatcher: "Dispatcher", model_name: str) -> None:
        self._dispatcher = dispatcher
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Gauges of the last report, counters since the start of each engine's incarnation."""
        engines = self._dispatcher.engines()
        loads = [(engine, engine.load) for engine in engines if engine.load is not None]
        yield from _router_view(engines)
        yield from _reported(loads)
        yield from _tiers(self._dispatcher.tiers)
        yield from _vllm(loads, self._model_name)


def _router_view(engines: list[EngineSnapshot]) -> Iterator[Metric]:
    """What the router itself knows of its engines."""
    labels = ["engine", "role"]
    gauges: dict[str, tuple[str, Callable[[EngineSnapshot], float]]] = {
        "up": ("Whether the engine is ready.", lambda e: float(e.state == "ready")),
        "in_flight": ("Generations of this router that it has, or will get.", lambda e: float(e.in_flight)),
        "busy_seconds": ("For how long it had been at its oldest step, at its last beat.", lambda e: e.busy_s),
        "indexed_keys": ("Block keys of its cache in the router's prefix index.", lambda e: float(e.num_indexed_keys)),
    }
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"pdkv_engine_{name}", text, labels=labels)
        for engine in engines:
            family.add_metric([engine.name, engine.role], value(engine))
        yield family
    counters: dict[str, tuple[str, Callable[[EngineSnapshot], int]]] = {
        "deaths": ("How often the engine was lost.", lambda e: e.num_deaths),
        "malformed_messages": ("Frames and messages of it that could not be read.", lambda e: e.num_malformed),
    }
    for name, (text, count) in counters.items():
        total = CounterMetricFamily(f"pdkv_engine_{name}", text, labels=labels)
        for engine in engines:
            total.add_metric([engine.name, engine.role], count(engine))
        yield total


def _reported(loads: list[tuple[EngineSnapshot, LoadReport]]) -> Iterator[Metric]:
    """What the engines say of themselves."""
    labels = ["engine", "role"]
    for field, (name, text) in _LOAD_GAUGES.items():
        gauge = GaugeMetricFamily(f"pdkv_engine_{name}", text, labels=labels)
        for engine, load in loads:
            gauge.add_metric([engine.name, engine.role], getattr(load, field))
        yield gauge
    for field, (name, text) in _LOAD_COUNTERS.items():
        counter = CounterMetricFamily(f"pdkv_engine_{name}", text, labels=labels)
        for engine, load in loads:
            counter.add_metric([engine.name, engine.role], getattr(load, field))
        yield counter
    blocks = GaugeMetricFamily("pdkv_engine_blocks", "KV blocks by class.", labels=[*labels, "class"])
    sources = CounterMetricFamily(
        "pdkv_engine_prompt_tokens", "Prompt tokens by where their KV came from.", labels=[*labels, "source"]
    )
    for engine, load in loads:
        for block_class in _BLOCK_CLASSES:
            blocks.add_metric([engine.name, engine.role, block_class], getattr(load.blocks, block_class))
        for source in _SOURCES:
            sources.add_metric([engine.name, engine.role, source], getattr(load.sources, source))
    yield blocks
    yield sources
    for field, text in _CONNECTOR_COUNTERS.items():
        counter = CounterMetricFamily(f"pdkv_connector_{field}", text, labels=[*labels, "connector"])
        for engine, load in loads:
            for connector, stats in load.connectors.items():
                counter.add_metric([engine.name, engine.role, connector], getattr(stats, field))
        yield counter
    yield from _held(loads)


def _held(loads: list[tuple[EngineSnapshot, LoadReport]]) -> Iterator[Metric]:
    """What engines have in tiers that know it."""
    labels = ["engine", "role", "connector"]
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        "values": GaugeMetricFamily("pdkv_tier_values", "Values in a tier, by who wrote them.", labels=labels),
        "num_bytes": GaugeMetricFamily("pdkv_tier_bytes", "Memory that they take.", labels=labels),
        "capacity": GaugeMetricFamily("pdkv_tier_capacity_bytes", "Memory that they may take.", labels=labels),
        "evicted": CounterMetricFamily("pdkv_tier_evictions", "Values that made room for others.", labels=labels),
    }
    for engine, load in loads:
        for connector, stats in load.connectors.items():
            if stats.held is not None and stats.held.capacity:
                for field, family in families.items():
                    family.add_metric([engine.name, engine.role, connector], getattr(stats.held, field))
    yield from families.values()


def _tiers(tiers: TierIndex) -> Iterator[Metric]:
    """What the router knows of tiers below the caches."""
    keys = GaugeMetricFamily(
        "pdkv_tier_keys", "Keys of a tier below the caches that the router knows of.", labels=["medium", "engine"]
    )
    num_keys: Counter[tuple[str, str]] = Counter()  # media of one name, as of several hosts, together
    for tier in tiers.describe():
        num_keys[tier["medium"], "" if tier["shared"] else tier["engines"][0]] += tier["keys"]
    for labels, number in num_keys.items():
        keys.add_metric(labels, number)
    yield keys
    refused = CounterMetricFamily("pdkv_refused_tier_events", "What engines said of tiers that the router refused.")
    refused.add_metric([], tiers.num_refused)
    yield refused


def _vllm(loads: list[tuple[EngineSnapshot, LoadReport]], model_name: str) -> Iterator[Metric]:
    """Under vLLM's names; `engine` is the engine's name instead of its index."""
    labels = ["model_name", "engine"]
    gauges: dict[str, tuple[str, Callable[[LoadReport], float]]] = {
        "num_requests_running": ("Number of requests in model execution batches.", lambda load: load.running),
        "num_requests_waiting": ("Number of requests waiting to be processed.", lambda load: load.waiting),
        "kv_cache_usage_perc": ("KV-cache usage. 1 means 100 percent usage.", _usage),
    }
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
        for engine, load in loads:
            gauge.add_metric([model_name, engine.name], value(load))
        yield gauge
    queries, hits = (
        "prefix cache queries, in terms of number of queried tokens.",
        "prefix cache hits, in cached tokens.",
    )
    counters: dict[str, tuple[str, Callable[[LoadReport], int]]] = {
        "num_preemptions": ("Cumulative number of preemption from the engine.", lambda load: load.preemptions),
        "prefix_cache_queries": (f"Local {queries}", _queried),
        "prefix_cache_hits": (f"Local {hits}", lambda load: load.sources.local_hit),
        "external_prefix_cache_queries": (f"External {queries}", lambda load: _queried(load) - load.sources.local_hit),
        "external_prefix_cache_hits": (f"External {hits}", lambda load: load.sources.remote + load.sources.store),
    }
    for name, (text, value) in counters.items():
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        for engine, load in loads:
            counter.add_metric([model_name, engine.name], value(load))
        yield counter


def _usage(load: LoadReport) -> float:
    """Share of the blocks that nobody else could have now; cached ones can be taken."""
    blocks = load.blocks
    return 1.0 - (blocks.free + blocks.cached) / blocks.total if blocks.total else 0.0


def _queried(load: LoadReport) -> int:
    """Prompt tokens that the engine has looked for in its cache."""
    return sum(getattr(load.sources, source) for source in _SOURCES)
