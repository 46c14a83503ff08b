"""Turns plain numbers into metric families: counting is as cheap as possible, and formatting is left to a scrape."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pdkv.router.histogram import Histogram

Labels = Mapping[str, str]

NO_LABELS: Labels = {}

Rows = Iterable[tuple[Sequence[str], float]]
"""Values of labels, and the number for them."""


class Scraped(Collector):
    """Reads all numbers when scraped: they cost nothing in between."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """The current metric families."""
        return self._read()


class Exposed(NamedTuple):
    """A histogram under one of its names."""

    name: str
    help: str
    histogram: Histogram
    bounds: Sequence[float]  # some of the histogram's own bounds
    labels: Labels = NO_LABELS

    def family(self) -> Metric:
        """The current family."""
        family = HistogramMetricFamily(self.name, self.help, labels=list(self.labels))
        histogram = self.histogram
        counts = zip(self.bounds, histogram.cumulative(self.bounds), strict=True)
        buckets = [(repr(bound), float(count)) for bound, count in counts]
        family.add_metric(list(self.labels.values()), [*buckets, ("+Inf", float(histogram.count))], histogram.sum)
        return family


def totals(name: str, help: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Numbers that only grow, as a family."""
    return _filled(CounterMetricFamily(name, help, labels=labels), rows)


def gauges(name: str, help: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Current numbers, as a family."""
    return _filled(GaugeMetricFamily(name, help, labels=labels), rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: Rows) -> Metric:
    for values, number in rows:
        family.add_metric(values, number)
    return family


def counter(name: str, help: str, value: float, labels: Labels = NO_LABELS) -> Metric:
    """One number that only grows."""
    return totals(name, help, [*labels], [([*labels.values()], value)])


def gauge(name: str, help: str, value: float, labels: Labels = NO_LABELS) -> Metric:
    """One number."""
    return gauges(name, help, [*labels], [([*labels.values()], value)])


def counters(name: str, help: str, label: str, values: Mapping[str, float], labels: Labels = NO_LABELS) -> Metric:
    """Numbers that only grow, by one more label."""
    return totals(name, help, [*labels, label], (([*labels.values(), value], n) for value, n in values.items()))
