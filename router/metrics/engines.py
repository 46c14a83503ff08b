"""Prometheus metrics of the engines as they reported themselves last, under pdkv's names and under vLLM's."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from pdkv.router.engines.fleet import EngineState
from pdkv.router.metrics.exposition import Rows, counter, counters, gauge, gauges, totals
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.reports import LoadReport

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

Family = Callable[[str, str, Sequence[str], Rows], Metric]

_OF_ENGINE = ("engine", "role")
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


def engine_metrics(dispatcher: "Dispatcher", model_name: str) -> Iterator[Metric]:
    """Gauges of the last report, counters since the start of each engine's incarnation."""
    engines = dispatcher.engines()
    loads = [(engine, engine.load) for engine in engines if engine.load is not None]
    yield from _router_view(dispatcher, engines)
    yield from _reported(loads)
    yield from _tiers(dispatcher.tiers)
    yield from _vllm(loads, model_name)
    yield from _judgement(dispatcher, engines)


def _router_view(dispatcher: "Dispatcher", engines: list[EngineState]) -> Iterator[Metric]:
    """What the router itself knows of its engines."""
    beat = "For how long it had been at its oldest step, at its last beat."
    indexed = "Block keys of its cache in the router's prefix index."
    malformed = "Frames and messages of it that could not be read."
    table: list[tuple[Family, str, str, Callable[[EngineState], float]]] = [
        (gauges, "up", "Whether the engine is ready.", lambda e: e.life == "ready"),
        (gauges, "in_flight", "Generations of this router that it has, or will get.", lambda e: e.books.requests),
        (gauges, "busy_seconds", beat, lambda e: e.health.busy_s if e.life == "ready" else 0.0),
        (gauges, "indexed_keys", indexed, lambda e: dispatcher.index.num_keys_of(e.name)),
        (totals, "deaths", "How often the engine was lost.", lambda e: e.num_deaths),
        (totals, "malformed_messages", malformed, lambda e: dispatcher.num_malformed(e.name)),
    ]
    for family, name, text, value in table:
        yield family(f"pdkv_engine_{name}", text, _OF_ENGINE, (([e.name, e.role], value(e)) for e in engines))


def _reported(loads: list[tuple[EngineState, LoadReport]]) -> Iterator[Metric]:
    """What the engines say of themselves."""
    of = [([engine.name, engine.role], load) for engine, load in loads]
    for field, (name, text) in _LOAD_GAUGES.items():
        yield gauges(f"pdkv_engine_{name}", text, _OF_ENGINE, ((names, getattr(load, field)) for names, load in of))
    for field, (name, text) in _LOAD_COUNTERS.items():
        yield totals(f"pdkv_engine_{name}", text, _OF_ENGINE, ((names, getattr(load, field)) for names, load in of))
    blocks = (([*names, of_class], getattr(load.blocks, of_class)) for names, load in of for of_class in _BLOCK_CLASSES)
    yield gauges("pdkv_engine_blocks", "KV blocks by class.", [*_OF_ENGINE, "class"], blocks)
    sources = (([*names, source], getattr(load.sources, source)) for names, load in of for source in _SOURCES)
    text = "Prompt tokens by where their KV came from."
    yield totals("pdkv_engine_prompt_tokens", text, [*_OF_ENGINE, "source"], sources)
    labels = [*_OF_ENGINE, "connector"]
    stats = [([*names, connector], each) for names, load in of for connector, each in load.connectors.items()]
    for field, text in _CONNECTOR_COUNTERS.items():
        yield totals(f"pdkv_connector_{field}", text, labels, ((names, getattr(each, field)) for names, each in stats))
    held = [(names, each.held) for names, each in stats if each.held is not None and each.held.capacity]
    table: list[tuple[Family, str, str, str]] = [
        (gauges, "values", "values", "Values in a tier, by who wrote them."),
        (gauges, "bytes", "num_bytes", "Memory that they take."),
        (gauges, "capacity_bytes", "capacity", "Memory that they may take."),
        (totals, "evictions", "evicted", "Values that made room for others."),
    ]
    for family, name, field, text in table:
        yield family(f"pdkv_tier_{name}", text, labels, ((names, getattr(tier, field)) for names, tier in held))


def _tiers(tiers: TierIndex) -> Iterator[Metric]:
    """What the router knows of tiers below the caches."""
    num_keys: Counter[tuple[str, str]] = Counter()  # media of one name, as of several hosts, together
    for tier in tiers.describe():
        num_keys[tier["medium"], "" if tier["shared"] else tier["engines"][0]] += tier["keys"]
    text = "Keys of a tier below the caches that the router knows of."
    yield gauges("pdkv_tier_keys", text, ["medium", "engine"], num_keys.items())
    text = "What engines said of tiers that the router refused."
    yield counter("pdkv_refused_tier_events", text, tiers.num_refused)


def _vllm(loads: list[tuple[EngineState, LoadReport]], model_name: str) -> Iterator[Metric]:
    """Under vLLM's names; `engine` is the engine's name instead of its index."""
    queries = "prefix cache queries, in terms of number of queried tokens."
    hits = "prefix cache hits, in cached tokens."
    external = "external_prefix_cache"
    table: list[tuple[Family, str, str, Callable[[LoadReport], float]]] = [
        (gauges, "num_requests_running", "Number of requests in model execution batches.", lambda load: load.running),
        (gauges, "num_requests_waiting", "Number of requests waiting to be processed.", lambda load: load.waiting),
        (gauges, "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", _usage),
        (totals, "num_preemptions", "Cumulative number of preemption from the engine.", lambda load: load.preemptions),
        (totals, "prefix_cache_queries", f"Local {queries}", _queried),
        (totals, "prefix_cache_hits", f"Local {hits}", lambda load: load.sources.local_hit),
        (totals, f"{external}_queries", f"External {queries}", lambda load: _queried(load) - load.sources.local_hit),
        (totals, f"{external}_hits", f"External {hits}", lambda load: load.sources.remote + load.sources.store),
    ]
    for family, name, text, value in table:
        rows = (([model_name, engine.name], value(load)) for engine, load in loads)
        yield family(f"vllm:{name}", text, ["model_name", "engine"], rows)


def _judgement(dispatcher: "Dispatcher", engines: list[EngineState]) -> Iterator[Metric]:
    """What the router thinks of its engines: suspects, breakers, probes, moves."""
    health, named = dispatcher.health(), [([engine.name, engine.role], engine) for engine in engines]
    text = "Whether it seems to be stopped or stuck."
    yield gauges("pdkv_engine_suspect", text, _OF_ENGINE, ((names, bool(e.suspicion)) for names, e in named))
    text = "Whether others are asked first, because it fails too often."
    is_open = ((names, e.name in health.open_breakers) for names, e in named)
    yield gauges("pdkv_engine_breaker_open", text, _OF_ENGINE, is_open)
    text = "Pairs of a prefill and a decode engine whose KV loads fail too often."
    yield gauge("pdkv_pair_breakers_open", text, health.num_pairs_open)
    outcomes = {"ok": health.probes_ok, "failed": health.probes_failed}
    yield counters("pdkv_probes", "Probes of idle engines, by how they ended.", "outcome", outcomes)
    yield counter("pdkv_moves", "Requests taken off suspects.", health.num_moved)


def _usage(load: LoadReport) -> float:
    """Share of the blocks that nobody else could have now; cached ones can be taken."""
    blocks = load.blocks
    return 1.0 - (blocks.free + blocks.cached) / blocks.total if blocks.total else 0.0


def _queried(load: LoadReport) -> int:
    """Prompt tokens that the engine has looked for in its cache."""
    return sum(getattr(load.sources, source) for source in _SOURCES)
