"""A tenant that asks for streams and for answers with a shape at a steady rate, in a process of its own, until its
input ends; then prints a JSON line of what it waited for.

python -m soak.polite_tenant HOST PORT KEY TOKENS_PER_S

With TOKENS_PER_S above 0 it asks for so many tokens a second instead, half of them in prompts.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from typing import Any

import httpx

PERIOD_S = 0.5
"""Between the beginnings of two streams."""

SHAPED_EVERY = 4
"""Streams for each answer with a shape."""

PROMPT_TOKENS, MAX_TOKENS = 48, 32
FILLER_TOKENS = 64
_BODY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
_BOUND_S = 120.0
SHAPE = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "born": {"type": "integer", "minimum": 1800, "maximum": 1999}},
    "required": ["name", "born"],
    "additionalProperties": False,
}


class Polite:
    """What one tenant asked for, and what it waited for."""

    def __init__(self, host: str, port: int, key: str) -> None:
        headers = {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        self.client = httpx.AsyncClient(
            base_url=f"http://{host}:{port}", headers=headers, timeout=_BOUND_S, limits=limits
        )
        self.ttft_ms: list[float] = []
        self.gaps_ms: list[float] = []
        self.shaped_ms: list[float] = []
        self.failed: list[str] = []
        self._rng = random.Random(os.getpid())

    def prompt(self, num_tokens: int) -> list[int]:
        """A prompt that no process asked for before: what is cached costs less, in engines and in a key's books."""
        return [3 + self._rng.randrange(250) for _ in range(num_tokens)]

    async def stream(self) -> None:
        """One stream."""
        body = {**_BODY, "prompt": self.prompt(PROMPT_TOKENS), "max_tokens": MAX_TOKENS, "stream": True}
        began = last = time.perf_counter()
        num_events, tail = 0, ""
        async with self.client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                tail = line or tail
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                (self.gaps_ms if num_events else self.ttft_ms).append(1e3 * (now - last))
                last, num_events = now, num_events + 1
        if tail != "data: [DONE]":
            raise ValueError(f"a stream ended with {tail[:200]!r} after {time.perf_counter() - began:.1f} s")

    async def shaped(self, number: int) -> None:
        """One answer with a shape that was asked for before."""
        body = {"prompt": [9, 8, 3 + number % 250], "max_tokens": 64, "structured_outputs": {"json": SHAPE}}
        began = time.perf_counter()
        reply = (await self.client.post("/v1/completions", json=body)).json()
        answer = json.loads(reply["choices"][0]["text"])
        if set(answer) != {"name", "born"}:
            raise ValueError(f"{answer!r} has another shape")
        self.shaped_ms.append(1e3 * (time.perf_counter() - began))

    async def filler(self) -> None:
        """Tokens, and nothing is measured."""
        body = {**_BODY, "prompt": self.prompt(FILLER_TOKENS), "max_tokens": FILLER_TOKENS}
        (await self.client.post("/v1/completions", json=body)).raise_for_status()

    async def guarded(self, asked: Any, what: str) -> None:
        """Note what was wrong."""
        try:
            await asked
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.failed.append(f"{what}: {error!r}")

    def summary(self) -> dict[str, Any]:
        """JSON-ready."""
        shown = {"ttft": self.ttft_ms, "gap": self.gaps_ms, "shaped": self.shaped_ms}
        return {
            **{f"{name}_{key}": value for name, times in shown.items() for key, value in _percentiles(times).items()},
            "num_failed": len(self.failed),
            "failed": self.failed[:10],
        }


def _percentiles(times: list[float]) -> dict[str, float]:
    if not times:
        return {"num": 0}
    times = sorted(times)
    at = {"median_ms": len(times) // 2, "p99_ms": len(times) * 99 // 100, "worst_ms": len(times) - 1}
    return {"num": len(times), **{name: round(times[index], 2) for name, index in at.items()}}


async def _main(host: str, port: int, key: str, tokens_per_s: float) -> None:
    tenant = Polite(host, port, key)
    if not tokens_per_s:
        with contextlib.suppress(PermissionError):  # the processors of a client that measures are elsewhere
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    period_s = 2 * FILLER_TOKENS / tokens_per_s if tokens_per_s else PERIOD_S
    due, tasks, number = time.monotonic(), set[asyncio.Task[None]](), 0
    while not ended.done():
        asked = [tenant.filler()] if tokens_per_s else [tenant.stream()]
        if not tokens_per_s and number % SHAPED_EVERY == 0:
            asked.append(tenant.shaped(number))
        for one in asked:
            task = asyncio.create_task(tenant.guarded(one, one.__name__))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        number, due = number + 1, due + period_s
        await asyncio.wait([ended], timeout=max(due - time.monotonic(), 0.0))
    await asyncio.gather(*tasks)
    await tenant.client.aclose()
    print(json.dumps(tenant.summary()))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
