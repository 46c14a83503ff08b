"""Plain numbers as metric families: they are counted as cheaply as can be, and formatted when somebody scrapes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from pdkv.router.observability.histogram import Histogram

Labels = Mapping[str, str]

NO_LABELS: Labels = {}


class Exposed(NamedTuple):
    """A histogram under one of its names."""

    name: str
    help: str
    histogram: Histogram
    bounds: Sequence[float]  # some of the histogram's own
    labels: Labels = NO_LABELS

    def family(self) -> Metric:
        """As it is now."""
        family = HistogramMetricFamily(self.name, self.help, labels=list(self.labels))
        histogram = self.histogram
        counts = zip(self.bounds, histogram.cumulative(self.bounds), strict=True)
        buckets = [(repr(bound), float(count)) for bound, count in counts]
        family.add_metric(list(self.labels.values()), [*buckets, ("+Inf", float(histogram.count))], histogram.sum)
        return family


def counter(name: str, help: str, value: float, labels: Labels = NO_LABELS) -> Metric:
    """One number that only grows."""
    family = CounterMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def gauge(name: str, help: str, value: float, labels: Labels = NO_LABELS) -> Metric:
    """One number."""
    family = GaugeMetricFamily(name, help, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counters(name: str, help: str, label: str, values: Mapping[str, float], labels: Labels = NO_LABELS) -> Metric:
    """Numbers that only grow, by one more label."""
    family = CounterMetricFamily(name, help, labels=[*labels, label])
    for value, count in values.items():
        family.add_metric([*labels.values(), value], count)
    return family


def families(exposed: Iterable[Exposed]) -> Iterator[Metric]:
    """Of all of these histograms."""
    return (item.family() for item in exposed)
