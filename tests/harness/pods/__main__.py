"""`python -m pods`: the commands of the chart's pods as processes, with a real DNS server, under load.

Engines are replaced as by a rollout, which drains them, and lost with their nodes: no request may fail or be wrong.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from deployments import Running
from faults.inject import Strike
from faults.load import load_on, right_answers
from faults.report import HEADER, row
from faults.run import Outcome, count

from pods.cluster import Cluster, enter

VALUES = {
    "options": {"kv-cache-memory": "16MiB", "threads": 1, "in-turn-below-s": 0},
    "router": {"options": {"served-model-name": ["served"], "probe-interval-s": 0}, "leaveSeconds": 1},
    "engine": {"drainSeconds": 3, "startSeconds": 120},
    "dns": {"ttlSeconds": 2},
}

EVENTS: dict[str, Callable[[Cluster, Callable[[str], None]], None]] = {
    "rollout of decode": lambda cluster, move: cluster.replace_all("decode"),
    "rollout of prefill": lambda cluster, move: cluster.replace_all("prefill"),
    "rollout of the router": lambda cluster, move: cluster.replace_router(move),
    "node of decode lost": lambda cluster, move: cluster.lose_node_of("decode"),
    "node of prefill lost": lambda cluster, move: cluster.lose_node_of("prefill"),
}


def service(cluster: Cluster) -> Running:
    """The router, as clients of tests see a deployment."""
    return cast(Running, SimpleNamespace(url=cluster.pods["router"][0].url))


async def run_event(name: str, cluster: Cluster, expected: list[list[int]], num: int, rate: float) -> Outcome:
    """Send the load: a third of it before the event, and a third behind."""
    over = asyncio.Event()
    outcome = Outcome(backend="p2p", kind=name, place="pods", rate=rate, stop_s=0.0)

    async def act() -> None:
        began = time.monotonic()
        try:
            await asyncio.to_thread(EVENTS[name], cluster, partial(setattr, load.client, "base_url"))
        finally:
            outcome.stop_s = round(time.monotonic() - began, 1)
            over.set()

    async with load_on(service(cluster), name.replace(" ", "_"), rate) as load:
        await load.run(num // 3)
        acting = asyncio.create_task(act())
        await load.run(0, until=over)
        await load.run(max(num // 3, num - len(load.sent)))
        await load.finish()
        await acting
    count(load, Strike(), expected, outcome)
    return outcome


def main() -> int:
    """Run it; the exit status is 1 where a request was lost."""
    parser = argparse.ArgumentParser(prog="pods", description=__doc__)
    parser.add_argument("--events", nargs="*", default=list(EVENTS), choices=EVENTS)
    parser.add_argument("--requests", type=int, default=45, help="per event, at least")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="of another version's `pd`, for the first engines")
    options = parser.parse_args()
    enter()
    lost = 0
    with tempfile.TemporaryDirectory(prefix="pods-") as folder, Cluster(VALUES, Path(folder)) as cluster:
        try:
            new, cluster.programs = cluster.programs, options.old or cluster.programs
            pods = [cluster.add(name) for name in ("prefill", "decode")]
            cluster.programs = new
            pods.append(cluster.add("router"))
            cluster.wait_ready(*pods)
            expected = asyncio.run(right_answers(service(cluster)))
            print("\n".join(HEADER), flush=True)
            for name in options.events:
                outcome = asyncio.run(run_event(name, cluster, expected, options.requests, options.rate))
                print(row(outcome), *outcome.errors[:3], sep="\n  ", flush=True)
                lost += outcome.lost
            assert not lost, f"{lost} requests lost"
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                lines = [line for line in log.read_text().splitlines() if " 200 ok " not in line]
                print(f"--- {log.name}", *lines[-100:], sep="\n", file=sys.stderr)
            raise
        print(
            f"{lost} lost; {cluster.num_api_calls} calls of the API server; statuses {cluster.statuses}; "
            f"{cluster.zone.num_queries} questions to DNS"
        )
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
