"""Metrics of each API key's usage: a label per key of the file, of which there are at most MAX_KEYS."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from pdkv.router.admission.tenants import Tenant
from pdkv.router.metrics.exposition import gauges, totals


def key_metrics(tenants: Sequence[Tenant]) -> Iterator[Metric]:
    """Requests in flight now; refused requests and used tokens since the start. A removed key leaves the metrics."""
    table = [
        (gauges, "requests_in_flight", "num_requests", "Current requests of a key."),
        (gauges, "streams", "num_streams", "Current streaming requests of a key."),
        (totals, "refused", "num_refused", "Requests refused with 429 because of a key's limits."),
        (totals, "tokens", "num_tokens", "Tokens of prompts and outputs of a key."),
    ]
    for family, name, field, text in table:
        yield family(f"pdkv_key_{name}", text, ["key"], (([tenant.name], getattr(tenant, field)) for tenant in tenants))
