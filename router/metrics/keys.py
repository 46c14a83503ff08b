"""What each API key uses, as metrics: a label per key of the file, of which there are at most MAX_KEYS."""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from pdkv.router.admission.tenants import Tenant
from pdkv.router.metrics.exposition import gauges, totals


def key_metrics(tenants: Sequence[Tenant]) -> Iterator[Metric]:
    """In flight now; refused and used since the start. A key that leaves the file leaves the metrics."""
    table = [
        (gauges, "requests_in_flight", "num_requests", "Requests of a key now."),
        (gauges, "streams", "num_streams", "Those of them that stream."),
        (totals, "refused", "num_refused", "Requests beyond a key's limits: 429."),
        (totals, "tokens", "num_tokens", "Tokens of prompts and outputs of a key."),
    ]
    for family, name, field, text in table:
        yield family(f"pdkv_key_{name}", text, ["key"], (([tenant.name], getattr(tenant, field)) for tenant in tenants))
