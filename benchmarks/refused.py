"""Times requests that a full queue refuses: python -m benchmarks.refused URL MODEL NUMBER prints the seconds of each.

A process of its own, so that nothing but the router and the machine is in the figures.
"""

import http.client
import json
import sys
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

_FULL_WITHIN_S = 30.0
_WARM_UP = 5


def refused(url: str, model: str) -> tuple[float, int]:
    """Seconds from connecting to the whole answer, and its status."""
    where = urlsplit(url)
    body = json.dumps({"model": model, "prompt": "The quick brown fox " * 40, "max_tokens": 1, "stream": True})
    began = time.perf_counter()
    connection = http.client.HTTPConnection(str(where.hostname), where.port, timeout=60)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    reply.read()
    seconds = time.perf_counter() - began
    connection.close()
    return seconds, reply.status


def main(arguments: Sequence[str]) -> int:
    """Wait until the queue is full, then measure. Raises RuntimeError if it is not full all the while."""
    url, model, number = arguments
    deadline = time.monotonic() + _FULL_WITHIN_S
    while refused(url, model)[1] != 429:
        if time.monotonic() > deadline:
            raise RuntimeError("the queue does not become full")
    seen = [refused(url, model) for _ in range(_WARM_UP + int(number))][_WARM_UP:]
    if {status for _, status in seen} != {429}:
        raise RuntimeError(f"not all were refused: {sorted({status for _, status in seen})}")
    print(*(seconds for seconds, _ in seen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
