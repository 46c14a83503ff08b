"""Two tenants with a key each, one of them hostile by every means that a client with a key has: the other is served as
well as beside a polite tenant that was granted as many tokens.

    python -m soak.tenants --minutes 10

The hostile tenant comes first, since the tokens that it was granted are what the polite one asks for afterwards, over
as long a time. TTFT and gaps of the tenant in question are compared between the two; `/health` answers 200 all the
while, the router stays small, and no engine is late by more than LATE_S.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from deployments import NO_AUTHORITIES, Running
from prometheus_client.parser import text_string_to_metric_families

from soak.clients import beside, tracebacks
from soak.http_health import describe
from soak.report import RESULTS, write_json
from soak.small_launch import launched

FLAGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "64", "--in-turn-below-s", "0.05")
MAX_FACTOR = 1.3
MIN_SHARE = 0.8  # of the hostile tenant's tokens, for the polite one: with fewer, two different loads are compared
MAX_MORE_RESIDENT = 100 << 20
LATE_S = 1.0
TENANTS = ("victim", "hostile", "polite")
_PERIOD_S = 0.1
_WARM_UP_S = 5.0
_END_BOUND_S = 120.0


class Result(msgspec.Struct, kw_only=True):
    """What a run saw."""

    seconds: float
    hostile: dict[str, Any] = {}
    tokens: dict[str, int] = {}  # of the hostile tenant, and of the polite one
    victim: dict[str, Any] = {}  # beside the hostile tenant
    victim_before: dict[str, Any] = {}  # beside the polite one
    health: dict[str, Any] = {}
    health_before: dict[str, Any] = {}  # beside the polite one
    late_s: float = 0.0  # how long an engine was a suspect at the longest
    violations: list[str] = []
    slow: list[str] = []  # of what must hold on an otherwise idle machine

    def factor(self, name: str) -> float:
        """How many times longer the victim waits beside the hostile tenant."""
        return float(self.victim[f"{name}_p99_ms"] / self.victim_before[f"{name}_p99_ms"])


def make_keys(path: Path) -> dict[str, str]:
    """A file of keys, and each tenant's key by name."""
    keys = {}
    for name in TENANTS:
        command = [sys.executable, "-P", "-m", "pdkv.cli", "key", "new", name, "--append", str(path)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        keys[name] = next(word for word in ran.stdout.split() if word.startswith("pdk_"))
    return keys


class _Suspects:
    """How long an engine was a suspect at the longest, read by a thread."""

    def __init__(self, deployment: Running) -> None:
        self.longest_s = 0.0
        self._deployment = deployment
        self._stop = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        self._stop.clear()
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        since: dict[str, float] = {}
        with httpx.Client(base_url=self._deployment.url, timeout=60, verify=NO_AUTHORITIES) as client:
            while not self._stop.wait(_PERIOD_S):
                engines, now = client.get("/topology").json()["engines"], time.monotonic()
                for engine in engines:
                    begun = (
                        since.setdefault(engine["name"], now) if engine["suspect"] else since.pop(engine["name"], now)
                    )
                    self.longest_s = max(self.longest_s, now - begun)


def disturb(deployment: Running, keys: dict[str, str], seconds: float) -> Result:
    """The victim beside the hostile tenant, then beside the polite one; say what was wrong."""
    result = Result(seconds=seconds)
    router, engines = deployment.child_pid("pd router"), deployment.pids()
    with beside("polite_tenant", deployment, {}, keys["victim"], "0"):
        time.sleep(_WARM_UP_S)  # what is imported, compiled and allocated once
    suspects = _Suspects(deployment)
    with (
        beside("http_health", deployment, result.health, str(router)),
        suspects.watched(),
        beside("polite_tenant", deployment, result.victim, keys["victim"], "0"),
        beside("hostile_tenant", deployment, result.hostile, keys["hostile"], elsewhere=True),
    ):
        began = time.monotonic()
        time.sleep(seconds)
        while not _found(deployment, "hostile")["pdkv_key_tokens_total"] and time.monotonic() < began + _END_BOUND_S:
            time.sleep(_PERIOD_S)  # on a machine that has no time for it, it gets nowhere at first
        seconds = time.monotonic() - began
    result.late_s = round(suspects.longest_s, 2)
    result.tokens["hostile"] = _tokens_of(deployment, "hostile")
    rate = f"{max(result.tokens['hostile'] / seconds, 1.0):.1f}"
    filler: dict[str, Any] = {}
    with (
        beside("http_health", deployment, result.health_before, str(router)),
        suspects.watched(),
        beside("polite_tenant", deployment, result.victim_before, keys["victim"], "0"),
        beside("polite_tenant", deployment, filler, keys["polite"], rate, elsewhere=True),
    ):
        time.sleep(seconds)
    result.tokens["polite"] = _tokens_of(deployment, "polite")
    result.violations += [f"the polite tenant: {text}" for text in filler["failed"]]
    if deployment.child_pid("pd router") != router or deployment.pids() != engines:
        result.violations.append("a process ended")
    result.violations += tracebacks(deployment.lines)
    judge(result)
    return result


def _tokens_of(deployment: Running, key: str) -> int:
    """What a key was granted, once none of its requests is in flight."""
    deadline = time.monotonic() + _END_BOUND_S
    while (found := _found(deployment, key))["pdkv_key_requests_in_flight"] and time.monotonic() < deadline:
        time.sleep(_PERIOD_S)
    return int(found["pdkv_key_tokens_total"])


def _found(deployment: Running, key: str) -> dict[str, float]:
    """The metrics of a key, by name."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(deployment.get("/metrics").text)
        for sample in family.samples
        if sample.labels.get("key") == key
    }


def judge(result: Result) -> None:
    """Note what was wrong."""
    for name, seen in (("hostile", result.victim), ("polite", result.victim_before)):
        result.violations += [f"beside the {name} tenant: {text}" for text in seen["failed"]]
    result.violations += [f"a means gave up: {text}" for text in result.hostile["broken"]]
    errors = {name: count for name, count in result.hostile["counts"].items() if name.endswith((": 500", ": 502"))}
    result.violations += [f"{count} of {name}" for name, count in errors.items()]
    if result.health["num_unavailable"]:
        result.violations.append(f"/health was {result.health['num_unavailable']} times a 503")
    more = int(result.health["resident_worst"] - result.health["resident_before"])
    if more > MAX_MORE_RESIDENT:
        result.violations.append(f"the router's memory grew by {more >> 20} MiB")
    if (polite := result.tokens["polite"]) < MIN_SHARE * (hostile := result.tokens["hostile"]):
        result.slow.append(f"the polite tenant was granted {polite} tokens, and the hostile one {hostile}: too few")
    if result.late_s > LATE_S:
        result.slow.append(f"an engine was late by {result.late_s} s")
    for name in ("ttft", "gap"):
        if result.factor(name) > MAX_FACTOR:
            result.slow.append(
                f"the victim's p99 {name} is {result.factor(name):.2f} times that beside a polite tenant"
            )


def summary(result: Result) -> str:
    """Some lines for people."""
    did = ", ".join(f"{count} {name}" for name, count in sorted(result.hostile["counts"].items()))
    lines = [
        f"a hostile tenant for {result.seconds:g} s: {did}",
        f"  tokens of the hostile and of the polite tenant: {result.tokens['hostile']}, {result.tokens['polite']}",
    ]
    for name in ("ttft", "gap", "shaped"):
        now, before = result.victim, result.victim_before
        lines.append(
            f"  {name}: {now[f'{name}_median_ms']} ms median, {now[f'{name}_p99_ms']} p99, {now[f'{name}_worst_ms']} "
            f"worst; beside the polite tenant {before[f'{name}_median_ms']}, {before[f'{name}_p99_ms']} and "
            f"{before[f'{name}_worst_ms']}: p99 {result.factor(name):.2f} times"
        )
    lines += [
        f"  {describe(result.health)}",
        f"  beside the polite tenant {describe(result.health_before)}",
        f"  an engine was late by at most {result.late_s} s",
    ]
    return "\n".join([*lines, *(f"  VIOLATION {text[:3000]}" for text in [*result.violations, *result.slow])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser("soak.tenants", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the hostile tenant, and then of the polite one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the report")
    parser.add_argument("--fronts", type=int, default=0, help="processes for HTTP in front of the dispatcher")
    options = parser.parse_args(arguments)
    fronts = ("--router-fronts", str(options.fronts)) if options.fronts else ()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        path = Path(folder) / "keys.toml"
        keys = make_keys(path)
        with launched(*FLAGS, *fronts, "--api-key-file", str(path), initializer_range=0.2) as (deployment, _):
            result = disturb(deployment, keys, 60.0 * options.minutes)
    write_json("tenants", result, options.out)
    print(summary(result), flush=True)
    return 1 if result.violations or result.slow else 0


if __name__ == "__main__":
    sys.exit(main())
