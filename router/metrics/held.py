"""What requests hold of a router, as metrics: at rest each number is zero, which `make soak` asserts."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import Metric

from pdkv.router.metrics.exposition import gauge

_HELP = {
    "open_requests": "Requests to generate whose answers are not out, from their headers to their last byte.",
    "body_bytes": "Bodies that are read or worked on.",
    "waiting_bodies": "Bodies that wait for room to be read.",
    "text_bytes": "Texts that wait to be tokenized, or are.",
    "open_generations": "Choices that have begun and are not over.",
}


def held_metrics(held: Mapping[str, Callable[[], int]]) -> Iterator[Metric]:
    """The numbers, as they are now. `held`: by the names of _HELP."""
    return (gauge(f"pdkv_{name}", _HELP[name], number()) for name, number in held.items())
