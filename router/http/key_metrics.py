"""What each API key uses, as metrics: a label per key of the file, of which there are at most MAX_KEYS."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdkv.router.admission.tenants import Tenant


class KeyCollector(Collector):
    """Reads the tenants when it is scraped. A key that leaves the file leaves the metrics."""

    def __init__(self, tenants: Callable[[], Sequence[Tenant]]) -> None:
        self._tenants = tenants

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """In flight now; refused and used since the start."""
        requests = GaugeMetricFamily("pdkv_key_requests_in_flight", "Requests of a key now.", labels=["key"])
        streams = GaugeMetricFamily("pdkv_key_streams", "Those of them that stream.", labels=["key"])
        refused = CounterMetricFamily("pdkv_key_refused", "Requests beyond a key's limits: 429.", labels=["key"])
        tokens = CounterMetricFamily("pdkv_key_tokens", "Tokens of prompts and outputs of a key.", labels=["key"])
        for tenant in self._tenants():
            name = [tenant.name]
            requests.add_metric(name, tenant.num_requests)
            streams.add_metric(name, tenant.num_streams)
            refused.add_metric(name, tenant.num_refused)
            tokens.add_metric(name, tenant.num_tokens)
        return iter((requests, streams, refused, tokens))
