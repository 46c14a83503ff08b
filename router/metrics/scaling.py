"""Metrics of the autoscaler, which a scaler outside of the launch may follow, too."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from pdkv.router.metrics.exposition import counters, gauges
from pdkv.router.scaling.scaler import Scaler


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
