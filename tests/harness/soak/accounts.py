"""What a router counts as under way: at rest each is zero, not about zero, and none is ever below it."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

COUNTS = (
    "pdkv_requests_in_flight",
    "pdkv_waiting_for_engines",
    "pdkv_open_requests",
    "pdkv_open_generations",
    "pdkv_body_bytes",
    "pdkv_waiting_bodies",
    "pdkv_text_bytes",
    "pdkv_queue_choices",
    "pdkv_queue_pending_choices",
    "pdkv_queue_pending_tokens",
    "pdkv_engine_in_flight",
    "pdkv_engine_waiting",
    "pdkv_engine_running",
)
"""Gauges, one of a kind or one per engine."""

BLOCKS = "pdkv_engine_blocks"
BUSY_BLOCKS = ("active", "leased", "quarantined")


class Account(NamedTuple):
    """One number."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"{self.name} is {self.value:g}"


def accounts(metrics: str) -> list[Account]:
    """All that must be zero at rest, of the text of /metrics.

    Raises:
        ValueError: one is missing, so that nothing would be looked at.
    """
    found = list(_accounts(metrics))
    kinds = {account.name.partition("{")[0] for account in found}
    if missing := {*COUNTS, BLOCKS, "generations that did not end"} - kinds:
        raise ValueError(f"/metrics has no {', '.join(sorted(missing))}")
    return found


def _accounts(metrics: str) -> Iterator[Account]:
    begun = ended = 0.0
    blocks: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            engine = sample.labels.get("engine", "")
            if sample.name in COUNTS:
                yield Account(f"{sample.name}{{{engine}}}" if engine else sample.name, sample.value)
            elif sample.name == BLOCKS:
                blocks.setdefault(engine, {})[sample.labels["class"]] = sample.value
            elif sample.name == "pdkv_generations_started_total":
                begun = sample.value
            elif sample.name == "pdkv_generations_total":
                ended += sample.value
    yield Account("generations that did not end", begun - ended)
    for engine, classes in blocks.items():
        yield from (Account(f"{BLOCKS}{{{engine}, {name}}}", classes[name]) for name in BUSY_BLOCKS)
        rest = classes["total"] - sum(count for name, count in classes.items() if name != "total")
        yield Account(f"{BLOCKS}{{{engine}, nowhere}}", rest)
