"""Prometheus metrics of the engines from their latest reports, under pdkv's names and under vLLM's."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from pdkv.router.engines.state import EngineState
from pdkv.router.metrics.exposition import Rows, counter, counters, gauge, gauges, totals
from pdkv.router.routing.tier_index import TierIndex
from pdkv.wire.reports import LoadReport

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher

Family = Callable[[str, str, Sequence[str], Rows], Metric]

_OF_ENGINE = ("engine", "role")
_BLOCK_CLASSES = ("total", "free", "cached", "active", "leased", "quarantined")
_DRAFTED = ("found", "computed")
_SOURCES = ("computed", "recomputed", "local_hit", "remote", "store")

_LOAD_GAUGES = {
    "waiting": ("waiting", "Requests that wait in the engine."),
    "running": ("running", "Requests in the engine's batch."),
}
_LOAD_COUNTERS = {
    "bytes_received": ("kv_received_bytes", "KV received from peers."),
    "load_failures": ("kv_load_failures", "Failed KV loads."),
    "partial_loads": ("kv_partial_loads", "KV loads that a store could serve only partly."),
    "damaged_values": ("kv_damaged_values", "Stored values that did not match what was saved, counted as misses."),
    "non_finite_requests": ("non_finite_requests", "Requests that --check-finite ended, for NaN or infinity."),
    "preemptions": ("preemptions", "Requests taken out of the batch."),
    "steps": ("steps", "Steps of the engine."),
    "transfer_seconds": ("kv_transfer_seconds", "Time spent in KV transfers."),
    "dropped_messages": ("dropped_messages", "Messages that the engine dropped: about what had ended, or not for it."),
}
"""Fields of LoadReport: the end of the metric's name after pdkv_engine_, and its help text."""

_CONNECTOR_COUNTERS = {
    "saves": "Successful KV transfers out of the engine, on each rank.",
    "loads": "Successful KV transfers into the engine, on each rank.",
    "saved_bytes": "KV sent, including failed transfers.",
    "loaded_bytes": "KV received, including failed transfers.",
    "failed_saves": "Failed KV transfers out of the engine.",
    "failed_loads": "Failed KV transfers into the engine.",
    "late_saves": "Values not saved because too much was in transit before their blocks were reused.",
    "failed_lookups": "Failed store lookups, treated as misses.",
    "timeouts": "Saves, loads and lookups that missed their deadline.",
    "fallbacks": "Loads taken over by another connector when one failed.",
    "tier_hits": "Values read from this tier of a store.",
    "tier_failures": "Calls of this tier that failed, or were skipped after a failure.",
    "read_bytes": "Bytes of values found in a store, or in this tier of one.",
    "read_seconds": "Seconds in which a rank was reading from it.",
    "damaged_values": "Stored values that did not match what was saved.",
    "corrupted_transfers": "KV transfers that failed because the received data did not match what the peer sent.",
    "load_seconds": "Seconds that threads of a store's connector spent on loads.",
    "hidden_load_seconds": "The part of load_seconds in which the engine computed and did not wait for the load.",
    "save_seconds": "Seconds that threads of a store's connector spent on saves.",
    "hidden_save_seconds": "The part of save_seconds in which the engine computed.",
}
"""Fields of ConnectorStats, and their help texts."""


def engine_metrics(dispatcher: "Dispatcher", model_name: str) -> Iterator[Metric]:
    """Gauges from the latest report, and counters since the start of each engine's incarnation."""
    engines = dispatcher.engines()
    loads = [(engine, engine.load) for engine in engines if engine.load is not None]
    yield from _router_view(dispatcher, engines)
    yield from _reported(loads)
    yield from _tiers(dispatcher.tiers)
    yield from _vllm(loads, model_name)
    yield _cache_config(engines, model_name)
    yield from _judgement(dispatcher, engines)


def _router_view(dispatcher: "Dispatcher", engines: list[EngineState]) -> Iterator[Metric]:
    """What the router itself knows about its engines."""
    beat = "For how long it had been at its oldest step, at its last beat."
    in_flight = "Generations of this router that the engine has, or will get."
    indexed = "Block keys of the engine's cache in the router's prefix index."
    malformed = "Frames and messages of it that could not be read."
    table: list[tuple[Family, str, str, Callable[[EngineState], float]]] = [
        (gauges, "up", "Whether the engine is ready.", lambda e: e.life == "ready"),
        (gauges, "in_flight", in_flight, lambda e: e.books.requests),
        (gauges, "busy_seconds", beat, lambda e: e.health.busy_s if e.life == "ready" else 0.0),
        (gauges, "indexed_keys", indexed, lambda e: dispatcher.index.num_keys_of(e.name)),
        (totals, "deaths", "Number of times the engine was lost.", lambda e: e.num_deaths),
        (totals, "malformed_messages", malformed, lambda e: dispatcher.num_malformed(e.name)),
    ]
    for family, name, text, value in table:
        yield family(f"pdkv_engine_{name}", text, _OF_ENGINE, (([e.name, e.role], value(e)) for e in engines))


def _reported(loads: list[tuple[EngineState, LoadReport]]) -> Iterator[Metric]:
    """What the engines report about themselves."""
    of = [([engine.name, engine.role], load) for engine, load in loads]
    for field, (name, text) in _LOAD_GAUGES.items():
        yield gauges(f"pdkv_engine_{name}", text, _OF_ENGINE, ((names, getattr(load, field)) for names, load in of))
    for field, (name, text) in _LOAD_COUNTERS.items():
        yield totals(f"pdkv_engine_{name}", text, _OF_ENGINE, ((names, getattr(load, field)) for names, load in of))
    text = "Time in which proposers guessed tokens."
    yield totals("pdkv_engine_drafting_seconds", text, _OF_ENGINE, ((names, load.drafts.seconds) for names, load in of))
    text = "Prompt tokens by where a draft model's KV came from."
    drafted = (
        ([*names, source], getattr(load.drafts, f"{source}_tokens")) for names, load in of for source in _DRAFTED
    )
    yield totals("pdkv_engine_drafter_prompt_tokens", text, [*_OF_ENGINE, "source"], drafted)
    pools = [([engine.name, engine.role], load.blocks) for engine, load in loads if _knows_pool(engine)]
    blocks = (([*names, of_class], getattr(pool, of_class)) for names, pool in pools for of_class in _BLOCK_CLASSES)
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
        (gauges, "values", "values", "Values in a tier, by the engine that wrote them."),
        (gauges, "bytes", "num_bytes", "Memory used by those values."),
        (gauges, "capacity_bytes", "capacity", "Memory limit of those values."),
        (totals, "evictions", "evicted", "Values evicted to make room for others."),
    ]
    for family, name, field, text in table:
        yield family(f"pdkv_tier_{name}", text, labels, ((names, getattr(tier, field)) for names, tier in held))


def _tiers(tiers: TierIndex) -> Iterator[Metric]:
    """What the router knows of tiers below the caches."""
    num_keys: Counter[tuple[str, str]] = Counter()  # media of the same name, as of several hosts, are added up
    for tier in tiers.describe():
        num_keys[tier["medium"], "" if tier["shared"] else tier["engines"][0]] += tier["keys"]
    text = "Keys of a tier below the caches that the router knows."
    yield gauges("pdkv_tier_keys", text, ["medium", "engine"], num_keys.items())
    text = "Tier reports of engines that the router refused."
    yield counter("pdkv_refused_tier_events", text, tiers.num_refused)


def _vllm(loads: list[tuple[EngineState, LoadReport]], model_name: str) -> Iterator[Metric]:
    """Metrics under vLLM's names; `engine` is the engine's name instead of its index."""
    queries = "prefix cache queries, in terms of number of queried tokens."
    hits = "prefix cache hits, in cached tokens."
    external = "external_prefix_cache"
    table: list[tuple[Family, str, str, Callable[[LoadReport], float]]] = [
        (gauges, "num_requests_running", "Number of requests in model execution batches.", lambda load: load.running),
        (gauges, "num_requests_waiting", "Number of requests waiting to be processed.", lambda load: load.waiting),
        (totals, "num_preemptions", "Cumulative number of preemption from the engine.", lambda load: load.preemptions),
        (totals, "prefix_cache_queries", f"Local {queries}", _queried),
        (totals, "prefix_cache_hits", f"Local {hits}", lambda load: load.sources.local_hit),
        (totals, f"{external}_queries", f"External {queries}", lambda load: _queried(load) - load.sources.local_hit),
        (totals, "spec_decode_num_drafts", "Number of spec decoding drafts.", lambda load: load.drafts.drafts),
        (totals, "spec_decode_num_draft_tokens", "Number of draft tokens.", lambda load: load.drafts.tokens),
        (totals, "spec_decode_num_accepted_tokens", "Number of accepted tokens.", lambda load: load.drafts.accepted),
        (totals, f"{external}_hits", f"External {hits}", lambda load: load.sources.remote + load.sources.store),
    ]
    labels = ["model_name", "engine"]
    for family, name, text, value in table:
        rows = (([model_name, engine.name], value(load)) for engine, load in loads)
        yield family(f"vllm:{name}", text, labels, rows)
    usage = (([model_name, engine.name], _usage(load)) for engine, load in loads if _knows_pool(engine))
    yield gauges("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", labels, usage)
    positions = (
        ([model_name, engine.name, str(i)], count)
        for engine, load in loads
        for i, count in enumerate(load.drafts.accepted_at)
    )
    text = "Accepted tokens per draft position."
    yield totals("vllm:spec_decode_num_accepted_tokens_per_pos", text, [*labels, "position"], positions)


def _cache_config(engines: list[EngineState], model_name: str) -> Metric:
    """Sizes of the engines' KV pools in labels, as vLLM has them and a Gateway's endpoint picker reads them."""
    labels = ["model_name", "engine", "block_size", "num_gpu_blocks"]
    cards = [engine.card for engine in engines if engine.card is not None and _knows_pool(engine)]
    sizes = [(each.engine, str(each.layout.block_size), str(each.num_blocks)) for each in cards]
    text = "Information of the KV cache."
    return gauges("vllm:cache_config_info", text, labels, (([model_name, *each], 1.0) for each in sizes))


def _judgement(dispatcher: "Dispatcher", engines: list[EngineState]) -> Iterator[Metric]:
    """The router's judgement of its engines: suspects, outliers, probes, moves."""
    prober, named = dispatcher.prober, [([engine.name, engine.role], engine) for engine in engines]
    text = "Whether the engine seems to be stopped or stuck."
    yield gauges("pdkv_engine_suspect", text, _OF_ENGINE, ((names, bool(e.suspicion)) for names, e in named))
    text = "Whether other engines are preferred because it does much worse than its peers."
    yield gauges("pdkv_engine_ejected", text, _OF_ENGINE, ((names, e.score.is_ejected) for names, e in named))
    text = "Pairs of a prefill and a decode engine whose latest KV load failed."
    yield gauge("pdkv_bad_pairs", text, len(dispatcher.fleet.pairs))
    outcomes = {"ok": prober.num_ok, "failed": prober.num_failed}
    yield counters("pdkv_probes", "Probes of idle engines, by result.", "outcome", outcomes)
    yield counter("pdkv_moves", "Requests moved off suspect engines.", dispatcher.mover.num_moved)


def _knows_pool(engine: EngineState) -> bool:
    """Whether the size of its pool is known: not that of a server of another engine."""
    return engine.card is None or not engine.card.backend


def _usage(load: LoadReport) -> float:
    """Share of the blocks that cannot be taken now; cached ones can be."""
    blocks = load.blocks
    return 1.0 - (blocks.free + blocks.cached) / blocks.total if blocks.total else 0.0


def _queried(load: LoadReport) -> int:
    """Prompt tokens that the engine has looked up in its cache."""
    return sum(getattr(load.sources, source) for source in _SOURCES)
