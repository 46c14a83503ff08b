"""Routing policies under load: the real dispatcher over simulated engines, on a clock of its own.

    python -m benchmarks.policies [--workload shared|turns|mixed] [--aggregated] [--rates 100,200,250] [--unequal]

Eight engines compute 20,000 prompt tokens a second, in the order of arrival. Each caches 65,536 tokens.
`shared`: 64 beginnings of 2,048 tokens, by Zipf's law, and 256 tokens more. `turns`: conversations of 8 turns on
average. `mixed`: prompts of 100 tokens and, one in ten, of 8,000. With `--aggregated`, engines also generate 150 tokens
on average. Printed for each rate and policy: the share of prompt tokens that were cached, and times to the first token
and to the last; `oracle` sees all caches and queues.
"""

import argparse
import asyncio
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple

from benchmarks.report import Claim, Context
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.router.engines.books import CONTEXT_WEIGHT
from pdkv.router.engines.engine_client import EngineListener
from pdkv.router.generations.dispatch import Dispatcher, GenerateRequest, Generation
from pdkv.sampling.params import SamplingParams
from pdkv.testing.clock import VirtualLoop
from pdkv.wire.kv import EngineCard, KVLayout
from pdkv.wire.messages import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EngineToRouter,
    Finished,
    KVEvents,
    RouterToEngine,
    Submit,
    Tokens,
)
from pdkv.wire.reports import SourceCounts

NUM_ENGINES = 8
CACHE_BLOCKS = 65_536 // HASH_BLOCK_SIZE
TOKEN_S = 1 / 20_000
"""Seconds of a prompt token."""
STEP_S, CONTEXT_TOKEN_S = 0.002, 5e-8
"""Seconds of an aggregated engine's step, and of each token of KV that it reads."""
STEP_TOKENS = 2048
MEAN_OUTPUT = 150
QUANTILES = (0.5, 0.9, 0.99)


class Clock:
    """What happens when, in order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._calls, (at, next(self._numbers), call))

    async def run(self) -> None:
        """Until nothing is left to happen; the event loop has its turns between two calls."""
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call()
            for _ in range(3):
                await asyncio.sleep(0)


@dataclass(eq=False)
class Job:
    """A prompt, and what became of it."""

    arrival: float
    token_ids: list[int]
    num_output: int = 1
    keys: Sequence[bytes] = ()
    submit: Submit | None = None
    num_left: int | None = None  # prompt tokens to compute; None: it has not begun
    num_cached: int = 0
    num_out: int = 0
    first_token: float = 0.0
    end: float = 0.0


@dataclass(eq=False)
class Engine:
    """A backend of the dispatcher: prompts in turn, chunk by chunk, beside what it decodes."""

    name: str
    role: str
    clock: Clock
    jobs: dict[tuple[int, ...], Job]
    num_dropped: int = 0
    listener: EngineListener | None = None
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    prompts: list[Job] = field(default_factory=list)
    decoding: list[Job] = field(default_factory=list)
    is_busy: bool = False
    slowness: float = 1.0
    cache_blocks: int = CACHE_BLOCKS
    num_given: int = 0
    numbers: count = field(default_factory=count)

    def connect(self, listener: EngineListener) -> None:
        self.listener = listener
        layout = KVLayout(num_layers=1, num_kv_heads=1, head_size=8, block_size=64, dtype="float32", dtype_bytes=4)
        card = EngineCard(
            engine=self.name, role=self.role, kind="pull", epoch="e", pid=1, connector="", content_addressed=False,
            orders=["prefill_first"], model="m", layout=layout, hash_block_size=HASH_BLOCK_SIZE,
            num_blocks=self.cache_blocks // 4, max_model_len=1 << 14, max_num_seqs=1 << 10,
            max_num_batched_tokens=STEP_TOKENS,
        )  # fmt: skip
        listener.engine_up(self.name, card)
        listener.engine_messages(self.name, [KVEvents(next(self.numbers), [CacheCleared()])])

    def close(self) -> None:
        self.listener = None

    def send(self, message: RouterToEngine) -> None:
        if isinstance(message, Submit):
            job = self.jobs[tuple(message.prompt_token_ids[-2:])]
            job.submit = message
            self.num_given += 1
            self.prompts.append(job)
            if not self.is_busy:
                self.begin_step()

    def num_hit(self, job: Job) -> int:
        return sum(1 for _ in takewhile(self.cache.__contains__, job.keys)) * HASH_BLOCK_SIZE

    def begin_step(self) -> None:
        room, done = STEP_TOKENS, []
        for job in self.prompts:
            if job.num_left is None:
                job.num_cached = min(self.num_hit(job), len(job.token_ids) - 1)
                job.num_left = len(job.token_ids) - job.num_cached
            num = min(job.num_left, room)
            room, job.num_left = room - num, job.num_left - num
            if not job.num_left:
                done.append(job)
            if not room:
                break
        self.is_busy = room < STEP_TOKENS or bool(self.decoding)
        if self.is_busy:
            seconds = (STEP_TOKENS - room) * TOKEN_S
            if self.role == "any":
                seconds += STEP_S + CONTEXT_TOKEN_S * sum(len(j.token_ids) + j.num_out for j in self.decoding)
            self.clock.call_at(self.clock.now + seconds * self.slowness, partial(self.end_step, done))

    def end_step(self, done: list[Job]) -> None:
        assert self.listener is not None
        said: list[EngineToRouter] = []
        for job in done:
            self.prompts.remove(job)
            job.first_token = self.clock.now
            self.store(job.keys, said)
        going, self.decoding = [*self.decoding, *done], []
        for job in going:
            assert job.submit is not None
            key = job.submit.request_id, job.submit.attempt
            said.append(Tokens(*key, job.num_out, [1]))
            job.num_out += 1
            if job.num_out == job.num_output:
                job.end = self.clock.now
                said.append(Finished(*key, "length", SourceCounts(computed=1), None))
            else:
                self.decoding.append(job)
        if said:
            self.listener.engine_messages(self.name, said)
        self.begin_step()

    def store(self, keys: Sequence[bytes], said: list[EngineToRouter]) -> None:
        new = [key for key in keys if key not in self.cache]
        for key in reversed(keys):  # a prompt's end is evicted before its beginning
            self.cache[key] = None
            self.cache.move_to_end(key)
        evicted = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - self.cache_blocks)]
        if new:
            events = [BlockStored(new, None), *([BlockRemoved(evicted)] if evicted else [])]
            said.append(KVEvents(next(self.numbers), events))

    def tokens_before_end(self, job: Job) -> float:
        """What an oracle counts: all that is before the job, and the job itself."""
        coming: set[bytes] = set()
        waiting = 0
        for other in [*self.prompts, job]:
            hit = sum(1 for _ in takewhile(lambda key: key in self.cache or key in coming, other.keys))
            waiting += len(other.token_ids) - hit * HASH_BLOCK_SIZE if other.num_left is None else other.num_left
            coming.update(other.keys)
        return self.slowness * (waiting + CONTEXT_WEIGHT * sum(len(j.token_ids) for j in self.decoding))


def make_jobs(workload: str, rate: float, num: int, rng: random.Random) -> list[Job]:
    """Prompts, each of which ends in two tokens of its own."""
    weights = [1 / (i + 1) for i in range(64)]
    jobs: list[Job] = []
    talks: list[list[int]] = []
    now = 0.0
    for i in range(num):
        now += rng.expovariate(rate)
        own = [1000 + i, 7]
        if workload == "shared":
            tokens = [rng.choices(range(64), weights)[0]] * 2048 + [1000 + i] * 254 + own
        elif workload == "mixed":
            tokens = [1000 + i] * (8000 if rng.random() < 0.1 else 100) + own
        else:
            if not talks or len(talks) < 64 or rng.random() < 1 / 8:
                talks = [*talks[-255:], [1000 + i] * 256]
            talk = rng.choice(talks)
            talk += [1000 + i] * rng.randint(100, 500) + own
            tokens = list(talk[-(1 << 13) :])
        jobs.append(Job(now, tokens))
    return jobs


RATES = {
    ("shared", False): 320, ("turns", False): 160, ("mixed", False): 140,
    ("shared", True): 160, ("turns", True): 100, ("mixed", True): 100,
}  # fmt: skip
"""Requests a second by workload, and whether engines are aggregated: 0.8 of those at which the oracle's queues grow."""

LEAST_HITS, MOST_P99 = 0.95, 1.5
"""Shares of the oracle's hits, and of its p99 of the time to the first token, that `prefix_aware` should keep."""


def run(context: Context) -> list[Claim]:
    """`prefix_aware` beside the oracle and `least_loaded`, with equal engines and with unequal ones."""
    claims = []
    for (workload, aggregated), rate in RATES.items():
        for unequal in (False, True):
            case = Case(workload, 0.9 * rate if unequal else rate, 100 if context.quick else 4000, aggregated, unequal)
            (oracle, oracle_s), (own, own_s), (least, least_s) = (
                figures(play(policy, case)) for policy in ("oracle", "prefix_aware", "least_loaded")
            )
            name = f"{workload}, {'aggregated' if aggregated else 'PD'}{', unequal engines' if unequal else ''}"
            seen = {"oracle_hits": oracle, "hits": own, "least_loaded_hits": least, "oracle_p99_s": oracle_s,
                    "p99_s": own_s, "least_loaded_p99_s": least_s, "requests_per_s": case.rate}  # fmt: skip
            if oracle:
                claims.append(Claim(f"{name}: hits / the oracle's", own / oracle, LEAST_HITS, "higher", seen))
            claims.append(Claim(f"{name}: p99 of TTFT / the oracle's", own_s / oracle_s, MOST_P99, "lower", seen))
    return claims


class Case(NamedTuple):
    """What is simulated."""

    workload: str
    rate: float
    requests: int
    aggregated: bool = False
    unequal: bool = False  # one engine is half as fast, another has half the cache
    num_engines: int = NUM_ENGINES
    seed: int = 1


def play(policy: str, case: Case) -> list[Job]:
    """The requests of a case under one policy, at their ends."""
    rng = random.Random(case.seed)
    jobs = make_jobs(case.workload, case.rate, case.requests, rng)
    for job in jobs if case.aggregated else ():
        job.num_output = rng.randint(1, 2 * MEAN_OUTPUT)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(simulate(policy, jobs, case))
    return jobs


def figures(jobs: Sequence[Job]) -> tuple[float, float]:
    """The share of prompt tokens that were hits, and the p99 of times to the first token in seconds."""
    times = sorted(job.first_token - job.arrival for job in jobs)
    hit = sum(job.num_cached for job in jobs) / sum(len(job.token_ids) for job in jobs)
    return hit, times[int(len(times) * 0.99)]


async def simulate(policy: str, jobs: Sequence[Job], case: Case) -> None:
    """Run all jobs under one policy."""
    clock, by_end = Clock(), {tuple(job.token_ids[-2:]): job for job in jobs}
    name = "prefix_aware" if policy == "oracle" else policy
    dispatcher = Dispatcher(policy=name, clock=lambda: clock.now, rng=random.Random(case.seed))
    role = "any" if case.aggregated else "prefill"
    engines = [Engine(f"{role}-{i}", role, clock, by_end) for i in range(case.num_engines)]
    if case.unequal:
        engines[0].slowness = 2.0
        engines[1].cache_blocks //= 2
    for engine in engines if case.aggregated else [*engines, Engine("decode-0", "decode", clock, by_end)]:
        dispatcher.add_backend(engine, engine.role)
    dispatcher.connect()
    readers = []

    def start(job: Job) -> None:
        dispatcher.fleet.review(clock.now)
        params = SamplingParams(max_tokens=job.num_output, seed=1)
        request = GenerateRequest(prompt_token_ids=job.token_ids, params=params, timeout_s=1e9)
        job.keys = dispatcher._holdings.of(request, clock.now).keys
        if policy == "oracle":
            best = min(engines, key=lambda engine: (engine.tokens_before_end(job), engine.num_given))
            generation = dispatcher.start_on(best.name, request)
        else:
            generation = dispatcher.start(request)
        readers.append(asyncio.ensure_future(read(generation)))

    for job in jobs:
        clock.call_at(job.arrival, partial(start, job))
    await clock.run()
    await asyncio.gather(*readers)
    dispatcher.close()


async def read(generation: Generation) -> None:
    async for _ in generation:
        pass


def report(jobs: Sequence[Job]) -> str:
    def at(times: list[float]) -> str:
        times.sort()
        return " / ".join(f"{times[int(len(times) * q)]:.3f}" for q in QUANTILES)

    hit = sum(job.num_cached for job in jobs) / sum(len(job.token_ids) for job in jobs)
    first, last = [job.first_token - job.arrival for job in jobs], [job.end - job.arrival for job in jobs]
    return f"{hit:.3f} | {at(first)} | {at(last)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=("shared", "turns", "mixed"), default="shared")
    parser.add_argument("--aggregated", action="store_true")
    parser.add_argument("--rates", default="100,200,250", help="requests a second (default: %(default)s)")
    parser.add_argument("--policies", default="least_loaded,prefix_aware,oracle", help="(default: %(default)s)")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=NUM_ENGINES)
    parser.add_argument("--unequal", action="store_true", help="one engine is half as fast, another has half the cache")
    args = parser.parse_args()
    print("| requests/s | policy | hits | TTFT p50 / p90 / p99 s | end p50 / p90 / p99 s |\n|---|---|---|---|---|")
    for rate in map(float, args.rates.split(",")):
        for policy in args.policies.split(","):
            case = Case(args.workload, rate, args.requests, args.aggregated, args.unequal, args.engines, args.seed)
            jobs = play(policy, case)
            print(f"| {rate:g} | {policy} | {report(jobs)} |", flush=True)


if __name__ == "__main__":
    main()
