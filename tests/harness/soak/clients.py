"""Rude clients beside running streams: router memory, /health and the streams' gaps stay as they were, and no 5xx.

100 clients never read the streams that they ask for, 1,000 connections are slow, conversations of 100,000 messages
arrive, and schemathesis tries the API by its own description. The gaps between a stream's events are compared with
those beside 100 clients that ask for the same streams and read them: the engines have the same to do.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from deployments import Running

from soak.http_health import describe, late
from soak.report import RESULTS, write_json
from soak.small_launch import launched
from soak.stalls import WATCHDOG, counted, own

NUM_STREAMS = 8
SEND_TIMEOUT_S = 5
FLAGS = ("--kv-cache-memory", "128MiB", "--send-timeout-s", str(SEND_TIMEOUT_S))
MAX_UNAVAILABLE = 0.1
"""Of the answers of /health: on a machine out of time engines may be silent for a moment."""

_SILENT_ENGINES = "slow: idle: 503"
"""What /ping answered: how often that may be is judged by /health."""

MAX_MORE_RESIDENT = 50 << 20
MAX_GAP_FACTOR = 1.2
_END_BOUND_S = 60.0
_HARNESS = Path(__file__).parents[1]
_SCHEMATHESIS = ("--checks", "not_a_server_error", "--phases", "examples,coverage,fuzzing", "--seed", "0",
                 "--request-timeout", "60", "--suppress-health-check", "all", "--warnings", "off")  # fmt: skip


class Result(msgspec.Struct, kw_only=True):
    """What a run saw."""

    seconds: float
    polite: dict[str, Any] = {}
    rude: dict[str, Any] = {}
    gaps_before: dict[str, Any] = {}
    gaps: dict[str, Any] = {}
    health: dict[str, Any] = {}
    stalls: dict[str, int] = {}  # of the event loop, by what held it and how
    schemathesis: str = ""  # its summary
    violations: list[str] = []  # of what must always hold
    slow: list[str] = []  # of what must hold on an otherwise idle machine

    @property
    def gap_factor(self) -> float:
        """The streams' p99 gap beside rude clients over that beside polite ones."""
        return float(self.gaps["p99_ms"] / self.gaps_before["p99_ms"])

    @property
    def resident_more(self) -> int:
        """Bytes that the router had more at its worst than before."""
        return int(self.health["resident_worst"] - self.health["resident_before"])


@contextlib.contextmanager
def beside(
    module: str, deployment: Running, into: dict[str, Any], *arguments: str, elsewhere: bool = False
) -> Iterator[None]:
    """Run one of the soak's modules in a process of its own during the block; what it prints goes `into` the dict.

    A client that lives `elsewhere` takes processor time only where the deployment leaves some: its own work would not
    be done on the host that serves it.
    """
    url = urlsplit(deployment.url)
    command = [sys.executable, "-m", f"soak.{module}", str(url.hostname), str(url.port), *arguments]
    process = subprocess.Popen(
        command, cwd=_HARNESS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=elsewhere
    )
    if elsewhere:
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        with contextlib.suppress(OSError):  # kernels that give each session an equal share look at this instead
            Path(f"/proc/{process.pid}/autogroup").write_text("19")
    try:
        yield
    finally:
        output, _ = process.communicate(timeout=_END_BOUND_S)
        assert process.returncode == 0, f"soak.{module} failed"
        into |= json.loads(output)


def disturb(deployment: Running, seconds: float) -> Result:
    """Polite clients first, then rude ones, each for so long; say what was wrong."""
    result = Result(seconds=seconds)
    router, engines = deployment.child_pid("pd router"), deployment.pids()
    with beside("rude_clients", deployment, result.polite, "polite"):
        time.sleep(2.0)  # the first request of each kind imports and allocates
        with beside("stream_gaps", deployment, result.gaps_before, str(NUM_STREAMS)):
            time.sleep(seconds)
    with (
        beside("http_health", deployment, result.health, str(router)),
        beside("stream_gaps", deployment, result.gaps, str(NUM_STREAMS)),
        beside("rude_clients", deployment, result.rude, "rude"),
    ):
        result.schemathesis = _run_schemathesis(deployment, seconds, result)
    if deployment.child_pid("pd router") != router or deployment.pids() != engines:
        result.violations.append("a process ended")
    result.violations += tracebacks(deployment.lines)
    result.stalls = counted(deployment.get("/metrics").text)
    _await_rest(deployment, result)
    _judge(result)
    return result


def tracebacks(lines: Sequence[str]) -> list[str]:
    """Those in a log, each with the lines before and behind it."""
    found = [i for i, line in enumerate(lines) if "Traceback" in line]
    return [f"a traceback: {chr(10).join(lines[max(i - 3, 0) : i + 40])}" for i in found]


def _run_schemathesis(deployment: Running, seconds: float, result: Result) -> str:
    """Its summary; it ends before `seconds` are over, and what is left of them is waited for."""
    ends = time.monotonic() + seconds
    program = Path(sys.executable).with_name("schemathesis")
    if not program.exists():
        time.sleep(seconds)
        return "not installed"
    command = ["nice", str(program), "run", "openapi.json", "--url", deployment.url, *_SCHEMATHESIS]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        (Path(folder) / "openapi.json").write_bytes(deployment.get("/openapi.json").content)  # it waits for 10 s only
        ran = subprocess.run(
            [*command, "--max-time", str(max(int(seconds) - 5, 1))],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=10 * seconds + _END_BOUND_S,
        )
    if ran.returncode:
        result.violations.append(f"schemathesis: {ran.stdout[-3000:]}")
    time.sleep(max(ends - time.monotonic(), 0.0))
    return "; ".join(re.findall(r"\d+ generated.*|\d+ passed.*", ran.stdout)) or ran.stdout[-300:]


def _await_rest(deployment: Running, result: Result) -> None:
    """All that was asked for has ended, though its clients left without a word."""
    deadline = time.monotonic() + _END_BOUND_S
    while "pdkv_requests_in_flight 0.0" not in deployment.get("/metrics").text.splitlines():
        if time.monotonic() > deadline:
            result.violations.append(f"requests are in flight {_END_BOUND_S:g} s after the last client left")
            return
        time.sleep(0.2)


def _judge(result: Result) -> None:
    for name, seen in (("before", result.gaps_before), ("beside rude clients", result.gaps)):
        result.violations += [f"a stream {name} failed: {text}" for text in seen["failed"]]
    for clients in (result.polite, result.rude):
        result.violations += [f"a client gave up: {text}" for text in clients["broken"]]
        counts = clients["counts"].items()
        result.violations += [f"{name}: {n}" for name, n in counts if name[-3:-2] == "5" and name != _SILENT_ENGINES]
    if result.resident_more > MAX_MORE_RESIDENT:
        result.violations.append(f"the router's memory grew by {result.resident_more >> 20} MiB")
    result.slow += late(result.health)
    if result.health["num_unavailable"] > MAX_UNAVAILABLE * result.health["num_health"]:
        result.violations.append(f"/health was {result.health['num_unavailable']} times a 503")
    if result.gap_factor > MAX_GAP_FACTOR:
        result.slow.append(f"the p99 gap of streams is {result.gap_factor:.2f} times what it was")
    if held := own(result.stalls):
        result.slow.append(f"the event loop was held for more than 20 ms by {', '.join(held)}")


def summary(result: Result) -> str:
    """Some lines for people."""
    before, gaps = result.gaps_before, result.gaps
    did = ", ".join(f"{count} {name}" for name, count in sorted(result.rude["counts"].items()))
    lines = [
        f"rude clients for {result.seconds:g} s: {did}",
        f"  schemathesis: {result.schemathesis}",
        f"  gaps of streams: {gaps['median_ms']} ms median, {gaps['p99_ms']} p99; {before['median_ms']} and "
        f"{before['p99_ms']} beside polite clients: p99 {result.gap_factor:.2f} times",
        f"  {describe(result.health)}",
        "  the loop was held by " + (", ".join(f"{name} {count}" for name, count in result.stalls.items()) or "nobody"),
    ]
    return "\n".join([*lines, *(f"  VIOLATION {text[:3000]}" for text in [*result.violations, *result.slow])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("soak.clients", description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="of polite clients, and then of rude ones")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    options = parser.parse_args(arguments)
    with launched(*FLAGS, *WATCHDOG, initializer_range=0.2) as (deployment, _):
        result = disturb(deployment, options.seconds)
    write_json("clients", result, options.out)
    print(summary(result), flush=True)
    return 1 if result.violations or result.slow else 0


if __name__ == "__main__":
    sys.exit(main())
