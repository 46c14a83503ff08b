"""Hostile schemas and patterns beside streams and honest answers with a shape: nobody else comes to harm.

    python -m soak.shapes --requests 500

One prefill and one decode engine. The gaps of the streams and the time of honest answers are compared with those of a
quiet run of the same; no process ends but those that match grammars, whose bounds end them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from deployments import NO_AUTHORITIES, Running
from doors import processes_of

from soak.clients import beside, tracebacks
from soak.hostile_shapes import Hostile, hostile_shapes
from soak.report import RESULTS, write_json
from soak.small_launch import launched

NUM_STREAMS = 4
NUM_HOSTILE = 8
"""Requests of theirs at once."""

MAX_TOKENS = 64
ANSWER_BOUND_S = 120.0
FLAGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "32", "--grammar-time-s", "2")
ALLOWED = frozenset({200, 400, 413, 503})
HONEST = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer", "minimum": 1800, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
_PERIOD_S = 0.1


class Result(msgspec.Struct, kw_only=True):
    """What a run saw."""

    seed: int
    num_requests: int
    load_before: float  # the machine's load average: above a few tenths others were at work
    seconds: float = 0.0  # of hostile requests
    statuses: dict[str, int] = {}  # of them
    by_kind: dict[str, dict[str, int]] = {}
    worst_s: float = 0.0  # of their answers
    gaps_before: dict[str, Any] = {}
    gaps: dict[str, Any] = {}
    honest_before_ms: dict[str, float] = {}
    honest_ms: dict[str, float] = {}
    resident_mib: dict[str, tuple[int, int]] = {}  # before, at worst; all of a name together
    num_matching: int = 0  # processes that matched grammars: more than two of an engine's were ended by their bounds
    violations: list[str] = []


class _Memory:
    """Resident memory of a deployment's processes, read by a thread."""

    def __init__(self, deployment: Running) -> None:
        self._deployment = deployment
        self._stop = threading.Event()
        self.first: dict[str, int] = {}
        self.worst: dict[str, int] = {}
        self.matching: set[int] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self._read()
        self.first = dict(self.worst)
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self._read()

    def _read(self) -> None:
        now: Counter[str] = Counter()
        for process in processes_of(self._deployment):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                name = process.name()
                if name == "pdkv-grammar":
                    self.matching.add(process.pid)
                now[name] += process.memory_info().rss
        for name, size in now.items():
            self.worst[name] = max(self.worst.get(name, 0), size)


def disturb(deployment: Running, num_requests: int, quiet_s: float, seed: int) -> Result:
    """Honest clients alone, then beside hostile ones; say what was wrong."""
    result = Result(seed=seed, num_requests=num_requests, load_before=round(os.getloadavg()[0], 1))
    router, engines = deployment.child_pid("pd router"), deployment.pids()
    asyncio.run(_honest_for(deployment.url, 0.0, result))  # its grammar is known, all is imported
    with beside("stream_gaps", deployment, result.gaps_before, str(NUM_STREAMS)):
        result.honest_before_ms = asyncio.run(_honest_for(deployment.url, quiet_s, result))
    memory = _Memory(deployment)
    began = time.monotonic()
    with memory.watched(), beside("stream_gaps", deployment, result.gaps, str(NUM_STREAMS)):
        asyncio.run(_hostile(deployment.url, hostile_shapes(num_requests, seed), result))
    result.seconds = round(time.monotonic() - began, 1)
    result.num_matching = len(memory.matching)
    result.resident_mib = {name: (memory.first.get(name, 0) >> 20, size >> 20) for name, size in memory.worst.items()}
    if deployment.child_pid("pd router") != router or deployment.pids() != engines:
        result.violations.append(f"a process ended: {engines} before, {deployment.pids()} now")
    result.violations += tracebacks(deployment.lines)
    for name, seen in (("before", result.gaps_before), ("beside hostile ones", result.gaps)):
        result.violations += [f"a stream {name} failed: {text}" for text in seen["failed"]]
    return result


async def _hostile(url: str, shapes: Iterator[Hostile], result: Result) -> None:
    """All of them, so many at once, beside honest ones."""
    by_kind: dict[str, Counter[str]] = {}
    async with _client() as client, asyncio.TaskGroup() as group:
        stop = asyncio.Event()
        honest = group.create_task(_honest_until(client, url, stop, result))

        async def work() -> None:
            for shape in shapes:
                began = time.monotonic()
                outcome = await _send(client, url, shape, result)
                result.worst_s = max(result.worst_s, round(time.monotonic() - began, 2))
                by_kind.setdefault(shape.kind, Counter())[outcome] += 1

        await asyncio.gather(*(work() for _ in range(NUM_HOSTILE)))
        stop.set()
    result.honest_ms = _percentiles(honest.result())
    result.by_kind = {kind: dict(outcomes) for kind, outcomes in by_kind.items()}
    result.statuses = dict(sum(by_kind.values(), Counter()))


async def _send(client: httpx.AsyncClient, url: str, shape: Hostile, result: Result) -> str:
    """How it ended: the status, and the type of an error."""
    body = {"model": "served", "prompt": [5, 6, 7], "max_tokens": MAX_TOKENS, **shape.fields}
    try:
        reply = await client.post(f"{url}/v1/completions", json=body)
    except httpx.HTTPError as error:
        result.violations.append(f"{shape.kind}: {error!r}")
        return type(error).__name__
    if reply.status_code not in ALLOWED:
        result.violations.append(f"{shape.kind}: {reply.status_code} {reply.text[:300]}")
    error_type = reply.json()["error"]["type"] if reply.status_code != 200 else ""
    return f"{reply.status_code} {error_type}".strip()


def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=ANSWER_BOUND_S, verify=NO_AUTHORITIES)


async def _honest_for(url: str, seconds: float, result: Result) -> dict[str, float]:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, stop.set)
    async with _client() as client:
        return _percentiles(await _honest_until(client, url, stop, result))


async def _honest_until(client: httpx.AsyncClient, url: str, stop: asyncio.Event, result: Result) -> list[float]:
    """Milliseconds of honest answers, one after the other."""
    times = []
    while not stop.is_set():
        began = time.perf_counter()
        if error := await _answer(client, url):
            result.violations.append(f"an honest answer: {error}")
        times.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(_PERIOD_S)
    return times


async def _answer(client: httpx.AsyncClient, url: str) -> str | None:
    """What is wrong with an honest answer, if anything is."""
    body = {"model": "served", "prompt": [9, 8], "max_tokens": MAX_TOKENS, "structured_outputs": {"json": HONEST}}
    try:
        reply = await client.post(f"{url}/v1/completions", json=body)
        answer = json.loads(reply.json()["choices"][0]["text"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        return repr(error)
    return None if set(answer) == {"name", "born"} else f"{answer!r}"


def _percentiles(times: list[float]) -> dict[str, float]:
    times = sorted(times)
    shares = {"median": 0.5, "p99": 0.99, "worst": 1.0}
    found = {name: round(times[min(len(times) - 1, int(len(times) * share))], 1) for name, share in shares.items()}
    return {"num": len(times), **found}


def markdown(result: Result) -> str:
    """A table of what came of each kind, and the honest clients' figures."""
    lines = [
        f"# Hostile shapes, {result.num_requests} requests, seed {result.seed}",
        "",
        f"One prefill and one decode engine; {NUM_HOSTILE} hostile requests at once for {result.seconds:g} s, beside "
        f"{NUM_STREAMS} streams and honest answers with a shape. Slowest hostile answer: {result.worst_s:g} s. The "
        f"machine's load average before: {result.load_before:g}.",
        "",
        "| | quiet | beside hostile requests |",
        "|---|---|---|",
        *(
            f"| streams' gaps, {name}, ms | {result.gaps_before[f'{name}_ms']} | {result.gaps[f'{name}_ms']} |"
            for name in ("median", "p99", "worst")
        ),
        *(
            f"| honest answers, {name}, ms | {result.honest_before_ms[name]} | {result.honest_ms[name]} |"
            for name in ("median", "p99", "worst")
        ),
        *(f"| {name}, MiB resident | {first} | {worst} |" for name, (first, worst) in result.resident_mib.items()),
        "",
        f"Processes that matched grammars: {result.num_matching}. Violations: {len(result.violations) or 'none'}.",
        "",
        "| kind | outcomes |",
        "|---|---|",
        *(
            f"| {kind} | {', '.join(f'{count} of {name}' for name, count in sorted(outcomes.items()))} |"
            for kind, outcomes in sorted(result.by_kind.items())
        ),
        "",
        *(f"- **violation** {text[:600]}" for text in result.violations),
    ]
    return "\n".join(lines).rstrip() + "\n"


def save(result: Result, folder: Path) -> None:
    """One JSON file and one table per day."""
    write_json("shapes", result, folder).with_suffix(".md").write_text(markdown(result))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("soak.shapes", description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--quiet-s", type=float, default=30.0, help="of honest clients alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    with launched(*FLAGS, initializer_range=0.2) as (deployment, _):
        result = disturb(deployment, options.requests, options.quiet_s, options.seed)
    save(result, options.out)
    print(markdown(result), flush=True)
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
