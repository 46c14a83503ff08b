"""Bad clients against a real router with real engines: no 5xx, nothing ends, memory and /health stay as they were."""

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import psutil
from deployments import Running

from soak.http_health import describe, late
from soak.http_requests import Exchange, draw, named_attacks
from soak.report import RESULTS, write_json
from soak.small_launch import launched
from soak.stalls import WATCHDOG, counted, own

CLIENTS = 6
ANSWER_BOUND_S = 60.0
WARM_UP = 100
"""Requests before memory is measured: the allocator's arenas, and what the first request imports."""

MAX_MORE_RESIDENT = 50 << 20
_HARNESS = Path(__file__).parents[1]


class Result(msgspec.Struct, kw_only=True):
    """What a run saw."""

    seed: int
    num_requests: int
    statuses: dict[str, int] = {}  # by status, or how the connection ended
    kinds: dict[str, int] = {}
    health: dict[str, float | int] = {}
    stalls: dict[str, int] = {}  # of the event loop, by what held it and how
    violations: list[str] = []  # of what must always hold
    slow: list[str] = []  # of what must hold on an otherwise idle machine

    def resident_more(self) -> int:
        """Bytes that the router had more at its worst than before."""
        return int(self.health["resident_worst"] - self.health["resident_before"])


class _Clients:
    """Everything that the clients share."""

    def __init__(self, deployment: Running, result: Result) -> None:
        url = urlsplit(deployment.url)
        self.address = (str(url.hostname), int(url.port or 0))
        self._result = result
        self._statuses: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()

    async def work(self, exchanges: Iterator[Exchange]) -> None:
        """Do one after the other."""
        for exchange in exchanges:
            await self._do(exchange)

    async def _do(self, exchange: Exchange) -> None:
        self._kinds[exchange.name] += 1
        try:
            async with asyncio.timeout(ANSWER_BOUND_S):
                outcome = await self._exchange(exchange)
        except TimeoutError:
            outcome = "no answer"
        except OSError as error:
            outcome = type(error).__name__
        self._statuses[outcome] += 1
        status = int(outcome) if outcome.isdecimal() else 0
        lost = exchange.answered and not status
        if status >= 500 or lost or outcome == "no answer":
            self._result.violations.append(f"{exchange.name}: {outcome}, for {exchange.data[:300]!r}")
        self._result.statuses, self._result.kinds = dict(self._statuses), dict(self._kinds)

    async def _exchange(self, exchange: Exchange) -> str:
        """The status of the last response, or how it ended."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            sending = asyncio.ensure_future(_send(writer, exchange.data))
            if exchange.leaves:
                await sending
                return "left"
            reply = await reader.read()
            await sending
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if not reply.startswith(b"HTTP/1.1 "):
            return "closed" if not reply else "no HTTP"
        last = reply.rindex(b"HTTP/1.1 ")
        return reply[last + 9 : last + 12].decode()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """The server may refuse before it has everything."""
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
        if not writer.is_closing() and b"connection: close" not in data[:400]:
            writer.write_eof()


@contextlib.contextmanager
def _watched(deployment: Running, router: int, result: Result) -> Iterator[None]:
    """/health and memory, seen from another process."""
    url = urlsplit(deployment.url)
    command = [sys.executable, "-m", "soak.http_health", str(url.hostname), str(url.port), str(router)]
    process = subprocess.Popen(command, cwd=_HARNESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        output, _ = process.communicate(timeout=ANSWER_BOUND_S)
        if process.returncode == 0:
            result.health = json.loads(output)
        else:
            result.violations.append("/health failed")


def fuzz(deployment: Running, num_requests: int, seed: int) -> Result:
    """Send so many requests, the named attacks among them, and say what was wrong."""
    result = Result(seed=seed, num_requests=num_requests)
    rng = random.Random(seed)
    router = deployment.child_pid("pd router")
    engines = deployment.pids()
    asyncio.run(_run(_Clients(deployment, Result(seed=seed, num_requests=0)), (draw(rng) for _ in range(WARM_UP))))
    named = named_attacks()
    drawn = (draw(rng) for _ in range(num_requests - len(named)))
    with _watched(deployment, router, result):
        asyncio.run(_run(_Clients(deployment, result), (exchange for part in (named, drawn) for exchange in part)))
    if deployment.child_pid("pd router") != router or deployment.pids() != engines:
        result.violations.append(f"a process ended: {engines} and router {router} before, {deployment.pids()} now")
    if not psutil.pid_exists(router):
        result.violations.append("the router ended")
    tracebacks = sum("Traceback" in line for line in deployment.lines)
    if tracebacks:
        result.violations.append(f"{tracebacks} tracebacks in the log")
    result.stalls = counted(deployment.get("/metrics").text)
    _judge(result)
    return result


async def _run(clients: _Clients, exchanges: Iterator[Exchange]) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(clients.work(exchanges))


def _judge(result: Result) -> None:
    if not result.health:
        return
    if result.resident_more() > MAX_MORE_RESIDENT:
        result.violations.append(f"the router's memory grew by {result.resident_more() >> 20} MiB")
    result.slow += late(result.health)
    if held := own(result.stalls):
        result.slow.append(f"the event loop was held for more than 20 ms by {', '.join(held)}")


def summary(result: Result) -> str:
    """Some lines for people."""
    lines = [
        f"HTTP: {sum(result.statuses.values())} requests, seed {result.seed}: "
        + ", ".join(f"{count} of {name}" for name, count in sorted(result.statuses.items()))
    ]
    if result.health:
        lines.append(f"  {describe(result.health)}")
    lines.append("  the loop was held by " + (", ".join(f"{n} {c}" for n, c in result.stalls.items()) or "nobody"))
    return "\n".join([*lines, *(f"  VIOLATION {text[:600]}" for text in [*result.violations, *result.slow])])


def save(result: Result, folder: Path) -> None:
    """One JSON file per day."""
    violations = [text[:600] for text in result.violations]
    write_json("http-fuzz", msgspec.structs.replace(result, violations=violations), folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("soak.http_fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    with launched(*WATCHDOG, initializer_range=0.2) as (deployment, _):
        result = fuzz(deployment, options.requests, options.seed)
    save(result, options.out)
    print(summary(result), flush=True)
    return 1 if result.violations or result.slow else 0


if __name__ == "__main__":
    sys.exit(main())
