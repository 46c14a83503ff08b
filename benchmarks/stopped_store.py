"""Load over a Redis that is stopped (SIGSTOP) for a while: the rate that is left, and what host memory still gives."""

import asyncio
import random
import time
from contextlib import AbstractContextManager
from typing import NamedTuple

from benchmarks.client import Reply, complete
from benchmarks.load import random_prompt, run
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, metric, pdkv
from benchmarks.support import support_module

BEFORE_S, STOPPED_S, AFTER_S, WINDOW_S = 20.0, 30.0, 10.0, 5.0
CLIENTS, MAX_TOKENS = 3, 4
DOCUMENTS, TOKENS, VALUE_TOKENS = 16, 900, 64
POOL = "16MiB"
"""4,096 tokens of tiny: each document has made room for others when it is asked about again."""

REST_S = 15.0
LIMIT = 0.5


class _Done(NamedTuple):
    """A request that has ended."""

    at: float
    expected: int  # prompt tokens that need not be computed
    reply: Reply


class _Load:
    """Clients in a closed loop, who send new prompts and, in between, ask about known documents where there are any."""

    def __init__(self, server: Server, num_documents: int) -> None:
        self._server = server
        self.done: list[_Done] = []
        self._documents = [random_prompt(random.Random(n), TOKENS) for n in range(num_documents)]

    async def drive(self, redis: AbstractContextManager[None], scale: float) -> float:
        """Load before, during and after a stop; returns when that was."""
        for document in self._documents:
            await self._ask(document)
        stop_at = time.monotonic() + BEFORE_S * scale
        until = stop_at + (STOPPED_S + AFTER_S) * scale

        async def stop() -> None:
            await asyncio.sleep(stop_at - time.monotonic())
            with redis:
                await asyncio.sleep(STOPPED_S * scale)

        await asyncio.gather(stop(), *(self._client(number, until) for number in range(CLIENTS)))
        return stop_at

    async def _client(self, number: int, until: float) -> None:
        rng, turn = random.Random(-1 - number), number * len(self._documents) // CLIENTS
        while time.monotonic() < until:
            await self._ask(random_prompt(rng, TOKENS))
            if self._documents:
                document = self._documents[turn % len(self._documents)]
                await self._ask(document + random_prompt(rng, 20), TOKENS // VALUE_TOKENS * VALUE_TOKENS)
                turn += 1

    async def _ask(self, prompt: list[int], expected: int = 0) -> None:
        server = self._server
        reply = await complete(server.url, model=server.model, prompt=prompt, max_tokens=MAX_TOKENS)
        self.done.append(_Done(time.monotonic(), expected, reply))

    def rate(self, start: float, seconds: float) -> float:
        """Requests a second that were answered in that time."""
        return sum(done.reply.ok and start <= done.at < start + seconds for done in self.done) / seconds

    def found(self, start: float, seconds: float) -> tuple[int, int]:
        """(prompt tokens of documents found, expected) of that time's requests."""
        known = [done for done in self.done if done.expected and start <= done.at < start + seconds]
        return sum(min(d.reply.num_cached_tokens, d.expected) for d in known), sum(d.expected for d in known)


def run_all(context: Context) -> list[Claim]:
    """The lowest rate of 5 s from 5 s after the stop on / that before it; and what host memory gave meanwhile.

    Over a store alone the prompts are new: of known ones all would be computed anew, and that is no wait.
    """
    return [*_measure(context, is_behind=False), *_measure(context, is_behind=True)]


def _measure(context: Context, *, is_behind: bool) -> list[Claim]:
    scale = 1 / 20 if context.quick else 1.0
    with support_module("store_servers").RedisServer() as redis:
        flags = ["--connector", "store", "--connector-config", f"url={redis.url}"]
        if is_behind:
            flags = ["--connector", "shared_memory", "--kv-host-memory", "512MiB", "--kv-store", redis.url]
        options = ["--threads", "1", "--kv-cache-memory", POOL, *flags]
        with pdkv(find_model(context.models, "tiny"), prefill=1, decode=1, options=options) as server:
            load = _Load(server, DOCUMENTS if is_behind else 0)
            stop_at = run(load.drive(redis.stopped(), scale))
            held = _held_at_rest(server)
    before = load.rate(stop_at - BEFORE_S * scale, BEFORE_S * scale)
    starts = [number * WINDOW_S for number in range(round((STOPPED_S + AFTER_S) / WINDOW_S))]
    rates = {at: load.rate(stop_at + at * scale, WINDOW_S * scale) for at in starts}
    figures = {"before /s": before, **{f"at {at:g} s /s": rate for at, rate in rates.items()}}
    figures |= {"failed": sum(not done.reply.ok for done in load.done), "blocks held": held}
    where = f"Redis {'behind host memory' if is_behind else 'between the engines'}, stopped for {STOPPED_S * scale:g} s"
    lowest = min(rate for at, rate in rates.items() if at >= WINDOW_S)
    claims = [Claim(f"{where}: lowest rate / before", lowest / before, LIMIT, "higher", figures)]
    if is_behind:
        found, expected = load.found(stop_at, STOPPED_S * scale)
        tokens = {"found": float(found), "expected": float(expected)}
        claims.append(Claim(f"{where}: tokens of known documents", found / expected, 1.0, "higher", tokens))
    return claims


def _held_at_rest(server: Server) -> float:
    """Blocks of all pools that a request has, or that may still be written to, when all have ended."""
    deadline = time.monotonic() + REST_S
    while True:
        held = sum(metric(server, "pdkv_engine_blocks", **{"class": c}) for c in ("active", "leased", "quarantined"))
        if not held or time.monotonic() > deadline:
            return held
        time.sleep(0.5)
