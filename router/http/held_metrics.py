"""What requests hold of a router, as metrics: at rest each number is zero, which `make soak` asserts."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pdkv.router.http.exposition import gauge

_HELP = {
    "open_requests": "Requests to generate whose answers are not out, from their headers to their last byte.",
    "body_bytes": "Bodies that are read or worked on.",
    "waiting_bodies": "Bodies that wait for room to be read.",
    "text_bytes": "Texts that wait to be tokenized, or are.",
    "open_generations": "Choices that have begun and are not over.",
}


class HeldCollector(Collector):
    """Reads the numbers when it is scraped."""

    def __init__(self, held: Mapping[str, Callable[[], int]]) -> None:
        """`held`: by the names of _HELP, all of them."""
        assert held.keys() == _HELP.keys()
        self._held = held

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All of them, as they are now."""
        return (gauge(f"pdkv_{name}", _HELP[name], number()) for name, number in self._held.items())
