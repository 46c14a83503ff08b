"""Engines that compute nothing but say all that engines say, at a pace; and what brings them to life."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from typing import Any

from scripted_engine import make_card

from pdkv.errors import PdkvError
from pdkv.router.engines.engine_client import EngineListener
from pdkv.router.generations.dispatch import Dispatcher, GenerateRequest
from pdkv.router.metrics.requests import Metrics, RequestMetrics
from pdkv.sampling.params import SamplingParams
from pdkv.wire.kv import KVHandoff
from pdkv.wire.messages import (
    Beat,
    EngineToRouter,
    Failed,
    Finished,
    HandedOff,
    Loaded,
    Release,
    RouterToEngine,
    Submit,
    Tokens,
)  # fmt: skip
from pdkv.wire.reports import BlockCounts, ConnectorStats, LoadReport, SourceCounts, TierHeld

NUM_BLOCKS = 4096
TOKENS_A_STEP, STEP_S = 8, 0.16


class BusyEngine:
    """A backend that answers each Submit after a while, and reports its load."""

    def __init__(self, name: str, role: str, rng: random.Random | None = None) -> None:
        self.name, self.role, self.num_dropped = name, role, 0
        self.rng = rng or random.Random(0)
        self.listener: EngineListener | None = None
        self.running: dict[tuple[str, int], int] = {}  # blocks
        self.sources: dict[str, int] = {"computed": 0, "local_hit": 0, "remote": 0, "store": 0}
        self.hits = 0
        self.up = False
        self.epochs = itertools.count()

    def connect(self, listener: EngineListener) -> None:
        self.listener = listener

    def start(self) -> None:
        assert self.listener is not None
        self.up = True
        epoch = f"e{next(self.epochs)}"
        sizes = {"num_blocks": NUM_BLOCKS, "max_model_len": 1 << 16, "max_num_seqs": 64}
        card = make_card(self.name, self.role, "pull", epoch=epoch, connector="shared_memory", **sizes)
        self.listener.engine_up(self.name, card)

    def die(self, why: str) -> None:
        assert self.listener is not None
        self.up = False
        self.running.clear()
        self.listener.engine_down(self.name, why)

    def close(self) -> None:
        self.up = False

    def send(self, message: RouterToEngine) -> None:
        if isinstance(message, Submit) and self.up:
            self.running[message.request_id, message.attempt] = len(message.prompt_token_ids) // 3 + 250
            prefill = message.until == "first_token"
            later(
                self.rng.uniform(0.05, 0.25) if prefill else 0.01, self._prefilled if prefill else self._loaded, message
            )

    def say(self, *messages: EngineToRouter) -> None:
        if self.up and self.listener is not None:
            self.listener.engine_messages(self.name, list(messages))

    def _prefilled(self, submit: Submit) -> None:
        key, num = (submit.request_id, submit.attempt), len(submit.prompt_token_ids)
        if not self.running.pop(key, None):
            return
        hit = num * self.rng.choice((0, 0, 1, 2)) // 4
        stored = (num - hit) * self.rng.choice((0, 0, 0, 1)) // 3
        sources = SourceCounts(computed=num - hit - stored, local_hit=hit, store=stored)
        self._count(sources)
        handoff = KVHandoff(*key, submit.transfer_id, self.name, "e0", num, b"")
        self.say(Tokens(*key, 0, [5]), HandedOff(*key, sources, handoff, 0.01, 0.06))

    def _loaded(self, submit: Submit) -> None:
        key, num = (submit.request_id, submit.attempt), len(submit.prompt_token_ids)
        if self.rng.random() < 0.004:
            self.running.pop(key, None)
            self.say(Failed(*key, "internal_error", "an error of a fake", retryable=True))
            return
        seconds = self.rng.uniform(0.004, 0.03)
        self._count(SourceCounts(remote=num))
        if submit.handoff is not None:
            self.say(Loaded(*key, ok=True, num_bytes=num << 14, seconds=seconds))
            self.say(Release(submit.transfer_id, submit.handoff.attempt))
        self._step(submit, len(submit.output_token_ids) or 1)

    def _step(self, submit: Submit, position: int) -> None:
        key = (submit.request_id, submit.attempt)
        if key not in self.running:
            return
        num = min(TOKENS_A_STEP, (submit.params.max_tokens or 16) - position)
        if num > 0:
            self.say(Tokens(*key, position, [5] * num))
            later(STEP_S * self.rng.uniform(0.6, 1.5), self._step, submit, position + num)
            return
        del self.running[key]
        num_prompt = len(submit.prompt_token_ids)
        self.say(Finished(*key, "length", SourceCounts(remote=num_prompt), None))

    def _count(self, sources: SourceCounts) -> None:
        for name in self.sources:
            self.sources[name] += getattr(sources, name)
        self.hits += sources.store // 16

    def report(self) -> None:
        """What an engine reports a few times a second."""
        active = min(sum(self.running.values()), NUM_BLOCKS // 2)
        leased, cached = active // 8, NUM_BLOCKS // 3 + 7 * (self.sources["computed"] % 40)
        free = NUM_BLOCKS - active - leased - cached
        blocks = BlockCounts(total=NUM_BLOCKS, free=free, cached=cached, active=active, leased=leased, quarantined=0)
        held = TierHeld(self.hits, min(self.hits << 16, 3 << 29), 2 << 30, 3)
        tiers = {"multi/1-store/0-host": ConnectorStats(tier_hits=self.hits, held=held)}
        tiers["multi/1-store/1-redis"] = ConnectorStats(tier_hits=self.hits // 3, held=TierHeld())
        running = len(self.running)
        self.say(
            LoadReport(max(running - 6, 0), min(running, 6), blocks, SourceCounts(**self.sources), connectors=tiers)
        )
        self.say(Beat("e0", 0.0))


def later(seconds: float, call: Any, *args: Any) -> None:
    asyncio.get_running_loop().call_later(seconds, call, *args)


async def live(dispatcher: Dispatcher, engines: Sequence[BusyEngine], metrics: Metrics, rate: float, seconds: float,
               faults: bool = True) -> None:  # fmt: skip
    """Requests at a rate, and every few seconds an engine that dies and comes back."""
    rng, loop = random.Random(1), asyncio.get_running_loop()
    end, numbers, tasks = loop.time() + seconds, itertools.count(), set()
    next_fault, next_report = loop.time() + 4.0, 0.0
    while loop.time() < end:
        if loop.time() >= next_report:
            next_report = loop.time() + 0.25
            for engine in engines:
                engine.report()
        if faults and loop.time() >= next_fault:
            next_fault += 9.0
            victim = rng.choice(engines)
            victim.die("its process ended by signal 9")
            later(3.0, victim.start)
        task = asyncio.ensure_future(request(dispatcher, metrics, rng, next(numbers)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*tasks, return_exceptions=True)


async def request(dispatcher: Dispatcher, metrics: Metrics, rng: random.Random, number: int) -> None:
    """One, with the metrics that its endpoint would record."""
    seen = RequestMetrics(metrics, "completions")
    seen.prepared(1)
    prompt = [number % 7] * rng.choice((200, 800, 3000))
    params = SamplingParams(max_tokens=rng.choice((16, 64, 128)), seed=1)
    outcome, total = "ok", 0
    try:
        label = f"client-{number}"
        asked = GenerateRequest(prompt_token_ids=prompt, params=params, timeout_s=60.0, label=label)
        generation = dispatcher.start(asked)
        seen.dispatched()
        last = 0.0
        async for delta in generation:
            now = asyncio.get_running_loop().time()
            if delta.token_ids:
                seen.first_token(now)
                for _ in delta.token_ids[: len(delta.token_ids) if last else 0]:
                    seen.inter_token((now - last) / len(delta.token_ids))
                last, total = now, total + len(delta.token_ids)
        seen.choice_ended("length")
        seen.served(num_prompt_tokens=len(prompt), num_cached_tokens=0, num_completion_tokens=total)
    except PdkvError as error:
        outcome = error.code
    seen.ended(outcome)
