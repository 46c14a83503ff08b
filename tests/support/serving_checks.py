"""Many completions at once against a deployment, and the books of its engines from /metrics."""

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from deployments import Running, write_tokenizer
from prometheus_client.parser import text_string_to_metric_families

from pdkv.errors import TransferTimeout

REQUEST_BOUND_S = 300.0
REST_BOUND_S = 60.0
POLL_S = 0.02
SOURCES = ("computed", "recomputed", "local_hit", "remote", "store")
ROLES = ("prefill", "decode", "any")
ROUTER = "router"  # in place of a role
COUNTED = ("pdkv_engine_", "pdkv_moves_total", "pdkv_kv_loans_total")

Metrics = dict[tuple[str, ...], int]
"""Samples by (name, role) and, for prompt tokens by source, (name, role, source), summed over a role's engines."""


def serve_directory(model_dir: Path, directory: Path) -> Path:
    """The model beside a tokenizer, in a directory named "served"."""
    path = directory / "served"
    shutil.copytree(model_dir, path)
    write_tokenizer(path)
    return path


def complete_all(deployment: Running, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """POST all of them to /v1/completions at the same time; the replies have their order."""

    async def run() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=len(bodies))
        async with httpx.AsyncClient(timeout=REQUEST_BOUND_S, limits=limits, verify=False) as client:
            posts = [
                client.post(deployment.url + "/v1/completions", json={"model": "served", "return_token_ids": True, **b})
                for b in bodies
            ]
            replies = await asyncio.gather(*posts)
        for reply in replies:
            assert reply.status_code == 200, reply.text
        return [reply.json() for reply in replies]

    return asyncio.run(run())


@dataclass(frozen=True)
class Books:
    """What the engines of a deployment counted since some moment, and the router's moves and late loans."""

    counts: Metrics

    @property
    def roles(self) -> list[str]:
        """Of the engines there are."""
        return [role for role in ROLES if ("steps", role) in self.counts]

    def of(self, name: str, role: str) -> int:
        """A counter of pdkv_engine_*, summed over a role's engines."""
        return self.counts.get((name, role), 0)

    def sources(self, role: str) -> dict[str, int]:
        """Prompt tokens by source, summed over a role's engines."""
        return {source: self.counts.get(("prompt_tokens", role, source), 0) for source in SOURCES}

    def total(self, role: str) -> int:
        """Prompt tokens of all sources."""
        return sum(self.sources(role).values())

    @property
    def num_moved(self) -> int:
        """Requests that the router took off engines that seemed to be stuck, as starved ones do on a busy machine."""
        return self.of("moves", ROUTER)

    @property
    def num_late_loans(self) -> int:
        """What was computed because a lender that had it took too long, as one does that is starved for a second."""
        return self.of("late_loans", ROUTER)

    def __sub__(self, before: "Books") -> "Books":
        return Books({key: value - before.counts.get(key, 0) for key, value in self.counts.items()})


def complete_one(deployment: Running, **body: Any) -> tuple[list[int], Books]:
    """One greedy request for a prompt of token ids: its tokens, and what it cost on every side."""
    before = read_books(deployment)
    [reply] = complete_all(deployment, [{"temperature": 0, "ignore_eos": True, **body}])
    length = len(body["prompt"])
    books = settled_books(deployment, lambda now: all((now - before).total(role) >= length for role in now.roles))
    return reply["choices"][0]["token_ids"], books - before


def read_books(deployment: Running) -> Books:
    """The counters as they are now."""
    return _parse_books(deployment.get("/metrics").text)


def _parse_books(text: str) -> Books:
    counts: Counter[tuple[str, ...]] = Counter()
    lines = [line for line in text.splitlines() if line.startswith(COUNTED) and "_total" in line]
    for family in text_string_to_metric_families("\n".join(lines)):  # they are a part of it
        for sample in family.samples:
            if sample.name == "pdkv_moves_total":
                counts["moves", ROUTER] = int(sample.value)
            if sample.name == "pdkv_kv_loans_total" and sample.labels["outcome"] == TransferTimeout.code:
                counts["late_loans", ROUTER] = int(sample.value)
            if not sample.name.startswith("pdkv_engine_") or not sample.name.endswith("_total"):
                continue
            key = [sample.name.removeprefix("pdkv_engine_").removesuffix("_total"), sample.labels["role"]]
            if "source" in sample.labels:
                key.append(sample.labels["source"])
            counts[tuple(key)] += int(sample.value)
    return Books(dict(counts))


def at_rest(engines: Sequence[dict[str, Any]]) -> bool:
    """Whether no engine of /topology has a request, and every block is free or cached."""
    for engine in engines:
        blocks = engine["blocks"]
        if engine["waiting"] or engine["running"] or blocks["free"] + blocks["cached"] != blocks["total"]:
            return False
    return True


def settled_books(deployment: Running, done: Callable[[Books], bool]) -> Books:
    """The books when everything is at rest and `done`: an engine's report may come after the last reply."""
    deadline = time.monotonic() + REST_BOUND_S
    with httpx.Client(base_url=deployment.url, timeout=REQUEST_BOUND_S, verify=False) as client:
        while True:
            engines = client.get("/topology?fresh=true").json()["engines"]
            if at_rest(engines) and done(books := _parse_books(client.get("/metrics?fresh=true").text)):
                return books
            if time.monotonic() > deadline:
                raise AssertionError(f"not settled: {engines}\n{read_books(deployment)}\n{deployment.log}")
            time.sleep(POLL_S)
