"""Asks /health all the time, in a process of its own, until its input ends; prints a JSON line of what it saw.

python -m soak.http_health HOST PORT ROUTER_PID
"""

import http.client
import json
import select
import sys
import time

import psutil

_PERIOD_S = 0.005


def watch(host: str, port: int, pid: int) -> dict[str, float | int]:
    """Latencies of /health in ms, and the router's resident memory in bytes."""
    router = psutil.Process(pid)
    connection = http.client.HTTPConnection(host, port, timeout=60)
    latencies: list[float] = []
    resident = [router.memory_info().rss]
    while not select.select([sys.stdin], [], [], _PERIOD_S)[0]:
        began = time.perf_counter()
        connection.request("GET", "/health")
        reply = connection.getresponse()
        reply.read()
        latencies.append(time.perf_counter() - began)
        assert reply.status == 200, reply.status
        resident.append(router.memory_info().rss)
    connection.close()
    latencies.sort()
    return {
        "num_health": len(latencies),
        "median_ms": round(1e3 * latencies[len(latencies) // 2], 2),
        "p99_ms": round(1e3 * latencies[len(latencies) * 99 // 100], 2),
        "worst_ms": round(1e3 * latencies[-1], 2),
        "resident_before": resident[0],
        "resident_worst": max(resident),
        "resident_after": resident[-1],
    }


if __name__ == "__main__":
    print(json.dumps(watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
