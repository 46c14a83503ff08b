"""Metrics of what not every router has: API keys, and an autoscaler, whose wishes a scaler outside of the launch may
follow, too.
"""

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric

from pdkv.router.admission.tenants import Tenant
from pdkv.router.metrics.exposition import counters, gauges, totals
from pdkv.router.scaling.scaler import Scaler


def key_metrics(tenants: Sequence[Tenant]) -> Iterator[Metric]:
    """Requests in flight now; refused requests and used tokens since the start; at most MAX_KEYS keys. A removed key
    leaves the metrics.
    """
    table = [
        (gauges, "requests_in_flight", "num_requests", "Current requests of a key."),
        (gauges, "streams", "num_streams", "Current streaming requests of a key."),
        (totals, "refused", "num_refused", "Requests refused with 429 because of a key's limits."),
        (totals, "tokens", "num_tokens", "Tokens of prompts and outputs of a key."),
    ]
    for family, name, field, text in table:
        yield family(f"pdkv_key_{name}", text, ["key"], (([tenant.name], getattr(tenant, field)) for tenant in tenants))


def scaler_metrics(scaler: Scaler) -> Iterator[Metric]:
    """What was decided last, and how often engines were changed."""
    yield counters("pdkv_autoscaler_changes", "Engines changed by the autoscaler.", "change", scaler.counts)
    if (latest := scaler.latest) is None:
        return
    text = "Engines of a role that the autoscaler wants."
    yield gauges("pdkv_autoscaler_desired_engines", text, ["role"], (([r], n) for r, n in latest.desired.items()))
    text = "Predicted part of the requests that the engines of a role serve within the objectives."
    rows = (([role], part) for role, part in latest.figures["attainment"].items())
    yield gauges("pdkv_autoscaler_attainment", text, ["role"], rows)
