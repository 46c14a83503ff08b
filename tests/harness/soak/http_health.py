"""Asks /health all the time, in a process of its own, until its input ends; prints a JSON line of what it saw.

python -m soak.http_health HOST PORT ROUTER_PID

In turns with the router it asks a server that does nothing (`bare_server.py`), in a process of its own: on a machine
whose processors are taken that one is late, too. What `late` makes of both:

- the router's worst answer may take MAX_MS;
- where the bare server itself needed more than half of that at its worst, the machine was not idle, and the router may
  take longer by what the bare server took beyond that half. It is never allowed less for a good machine, and nothing is
  left out of what is shown.
"""

import contextlib
import http
import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

MAX_MS = 50.0
_PERIOD_S = 0.005
_TIMEOUT_S = 60
_HARNESS = Path(__file__).parents[1]

Health = Mapping[str, float | int]
"""What `watch` returns."""


def late(health: Health) -> list[str]:
    """What is wrong with the worst answer, and with answers that nothing can be served, if anything is."""
    allowed = MAX_MS + max(health["bare_worst_ms"] - MAX_MS / 2, 0.0)
    wrong = [f"/health was {health['num_unavailable']} times a 503"] if health["num_unavailable"] else []
    if health["worst_ms"] > allowed:
        bare = f"a bare server {health['bare_worst_ms']}: {allowed:.0f} are allowed"
        wrong.append(f"/health took {health['worst_ms']} ms, {bare}")
    return wrong


def describe(health: Health) -> str:
    """A line for people."""
    return (
        f"/health {health['median_ms']} ms median, {health['p99_ms']} p99, {health['worst_ms']} worst (a bare server: "
        f"{health['bare_median_ms']}, {health['bare_p99_ms']}, {health['bare_worst_ms']}); router "
        f"{int(health['resident_before']) >> 20} MiB, {int(health['resident_worst']) >> 20} at worst, "
        f"{int(health['resident_after']) >> 20} afterwards"
    )


def watch(host: str, port: int, pid: int) -> dict[str, float | int]:
    """Latencies of /health and of the bare server in ms, and the router's resident memory in bytes."""
    router = psutil.Process(pid)
    resident = [router.memory_info().rss]
    latencies: list[float] = []
    of_bare: list[float] = []
    num_unavailable = 0
    with _bare_server() as bare_port, _connection(host, port) as asked, _connection("127.0.0.1", bare_port) as bare:
        while not select.select([sys.stdin], [], [], _PERIOD_S)[0]:
            latency, status = _ask(asked)
            latencies.append(latency)
            num_unavailable += status == http.HTTPStatus.SERVICE_UNAVAILABLE
            of_bare.append(_ask(bare)[0])
            resident.append(router.memory_info().rss)
    return {
        "num_health": len(latencies),
        "num_unavailable": num_unavailable,
        **_summary(latencies, ""),
        **_summary(of_bare, "bare_"),
        "resident_before": resident[0],
        "resident_worst": max(resident),
        "resident_after": resident[-1],
    }


@contextlib.contextmanager
def _bare_server() -> Iterator[int]:
    """Its port."""
    command = [sys.executable, "-m", "soak.bare_server"]
    with subprocess.Popen(command, cwd=_HARNESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def _connection(host: str, port: int) -> "contextlib.closing[http.client.HTTPConnection]":
    return contextlib.closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S))


def _ask(connection: http.client.HTTPConnection) -> tuple[float, int]:
    """Milliseconds, and the status."""
    began = time.perf_counter()
    connection.request("GET", "/health")
    reply = connection.getresponse()
    reply.read()
    assert reply.status in (200, 503), reply.status
    return 1e3 * (time.perf_counter() - began), reply.status


def _summary(latencies: list[float], prefix: str) -> dict[str, float]:
    latencies.sort()
    count = len(latencies)
    shown = {"median_ms": latencies[count // 2], "p99_ms": latencies[count * 99 // 100], "worst_ms": latencies[-1]}
    return {prefix + name: round(value, 2) for name, value in shown.items()}


if __name__ == "__main__":
    print(json.dumps(watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
