"""Prometheus metrics of the router's judgement of its engines: suspects, breakers, probes, moves."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from pdkv.router.generations.dispatch import Dispatcher


class HealthCollector(Collector):
    """Reads the dispatcher when it is scraped."""

    def __init__(self, dispatcher: "Dispatcher") -> None:
        self._dispatcher = dispatcher

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Gauges as they are now, counters since the router's start."""
        health, labels = self._dispatcher.health(), ["engine", "role"]
        suspect = GaugeMetricFamily("pdkv_engine_suspect", "Whether it seems to be stopped or stuck.", labels=labels)
        breaker = GaugeMetricFamily(
            "pdkv_engine_breaker_open", "Whether others are asked first, because it fails too often.", labels=labels
        )
        for engine in health.engines:
            suspect.add_metric([engine.name, engine.role], float(engine.suspect))
            breaker.add_metric([engine.name, engine.role], float(engine.breaker_open))
        pairs = GaugeMetricFamily(
            "pdkv_pair_breakers_open", "Pairs of a prefill and a decode engine whose KV loads fail too often."
        )
        pairs.add_metric([], health.num_pairs_open)
        probes = CounterMetricFamily("pdkv_probes", "Probes of idle engines, by how they ended.", labels=["outcome"])
        probes.add_metric(["ok"], health.probes_ok)
        probes.add_metric(["failed"], health.probes_failed)
        moved = CounterMetricFamily("pdkv_moves", "Requests taken off suspects.", health.num_moved)
        yield from (suspect, breaker, pairs, probes, moved)
