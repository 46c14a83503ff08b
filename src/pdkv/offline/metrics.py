"""Counts of an engine since its start, under vLLM's names: `LLM.get_metrics`."""

import msgspec

from pdkv.wire.reports import LoadReport


class Metric(msgspec.Struct, kw_only=True):
    """One figure, or several of one name."""

    name: str
    labels: dict[str, str] = {}


class Counter(Metric, kw_only=True):
    """A number that only grows."""

    value: int


class Gauge(Metric, kw_only=True):
    """A current value."""

    value: float


class Histogram(Metric):
    """Never returned: latencies are in each RequestOutput."""


class Vector(Metric):
    """Never returned: vLLM uses it for speculative decoding."""


def read_metrics(load: LoadReport, num_tokens: int, num_ended: int) -> list[Metric]:
    """The metrics from the engine's reports, and from the tokens and choices that it has produced."""
    sources, blocks = load.sources, load.blocks
    queried = sum(msgspec.structs.astuple(sources))
    gauges = {
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
        "kv_cache_usage_perc": 1.0 - (blocks.free + blocks.cached) / blocks.total,
    }
    counters = {
        "prompt_tokens": queried,
        "generation_tokens": num_tokens,
        "request_success": num_ended,
        "prefix_cache_queries": queried,
        "prefix_cache_hits": sources.local_hit,
        "num_preemptions": load.preemptions,
        "spec_decode_num_drafts": load.drafts.drafts,
        "spec_decode_num_draft_tokens": load.drafts.tokens,
        "spec_decode_num_accepted_tokens": load.drafts.accepted,
    }
    return [
        *(Gauge(name=f"vllm:{name}", value=value) for name, value in gauges.items()),
        *(Counter(name=f"vllm:{name}", value=value) for name, value in counters.items()),
    ]
