"""Routing policies under load, in the simulator (docs/simulator.md): beside each other and beside an oracle.

    python -m benchmarks.policies [--workload shared|turns|mixed] [--aggregated] [--rates 100,200,250] [--unequal]

Eight engines compute 20,000 prompt tokens a second. The pool of each holds 65,536 tokens, or 131,072 if they are
aggregated: those generate 150 tokens on average besides.
`shared`: 64 beginnings of 2,048 tokens, by Zipf's law, and 256 tokens more. `turns`: conversations of 8 turns on
average. `mixed`: prompts of 100 tokens and, one in ten, of 8,000. Printed for each rate and policy: the share of prompt
tokens that were cached, and times to the first token and to the last; `oracle` sees all caches and queues.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Claim, Context
from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.bench.client import Reply
from pdkv.bench.serve import Pace
from pdkv.bench.workload import Session, one_turn
from pdkv.config import ReuseConfig
from pdkv.router.engines.books import CONTEXT_WEIGHT
from pdkv.router.generations.dispatch import GenerateRequest, Generation
from pdkv.simulate.deployment import Simulation, Topology
from pdkv.simulate.engine import EngineOptions, SimulatedEngine
from pdkv.testing.paced import read_profile

NUM_ENGINES = 8
MEAN_OUTPUT = 150
ALONE = ReuseConfig(kv_reuse="never", local_turns="never")
QUANTILES = (0.5, 0.9, 0.99)
BASE = replace(read_profile(Path("paced:h100")), prompt_token_s=5e-5, row_s=0.0, max_model_len=1 << 14)
PREFILL = EngineOptions(replace(BASE, step_s=1e-6, context_token_s=0.0), kv_tokens=1 << 16, hop_s=0.0)
BOTH = EngineOptions(replace(BASE, step_s=0.002, context_token_s=5e-8), kv_tokens=1 << 17, hop_s=0.0)

RATES = {
    ("shared", False): 320, ("turns", False): 160, ("mixed", False): 140,
    ("shared", True): 160, ("turns", True): 100, ("mixed", True): 100,
}  # fmt: skip
"""Requests a second by workload, and whether engines are aggregated: 0.8 of those at which the oracle's queues grow."""

LEAST_HITS, MOST_P99 = 0.95, 1.5
"""Shares of the oracle's hits, and of its p99 of the time to the first token, that `prefix_aware` should keep."""


class Case(NamedTuple):
    """What is simulated."""

    workload: str
    rate: float
    requests: int
    aggregated: bool = False
    unequal: bool = False  # one engine is half as fast, another has half the cache
    num_engines: int = NUM_ENGINES
    seed: int = 1

    @property
    def topology(self) -> Topology:
        """Engines that share no KV, so that hits are the policy's alone; without decode, answers are one token."""
        kind, name = (BOTH, "engine") if self.aggregated else (PREFILL, "prefill")
        slow = {field: 2 * getattr(kind.profile, field) for field in ("step_s", "prompt_token_s", "context_token_s")}
        other = {
            f"{name}-0": kind._replace(profile=replace(kind.profile, **slow)),
            f"{name}-1": kind._replace(kv_tokens=kind.kv_tokens // 2),
        }
        counts = (0, self.num_engines) if self.aggregated else (self.num_engines, 1)
        return Topology(kind, *counts, reuse=ALONE, others=other if self.unequal else {})


def prompts(case: Case, rng: random.Random) -> Iterator[list[int]]:
    """Prompts that end in tokens of their own."""
    weights = [1 / (i + 1) for i in range(64)]
    talks: list[list[int]] = []
    for own in range(1000, 1000 + case.requests):
        if case.workload == "shared":
            yield [rng.choices(range(64), weights)[0]] * 2048 + [own] * 256
        elif case.workload == "mixed":
            yield [own] * (8002 if rng.random() < 0.1 else 102)
        else:
            if len(talks) < 64 or rng.random() < 1 / 8:
                talks = [*talks[-255:], [own] * 256]
            talk = rng.choice(talks)
            talk += [own] * rng.randint(102, 502)
            yield talk[-(1 << 13) :]


def load(case: Case) -> Iterator[Session]:
    """Requests in Poisson arrivals."""
    rng, now = random.Random(case.seed), 0.0
    for prompt in prompts(case, rng):
        now += rng.expovariate(case.rate)
        yield one_turn(prompt, rng.randint(1, 2 * MEAN_OUTPUT) if case.aggregated else 1, now)


def play(policy: str, case: Case) -> list[Reply]:
    """The answers of a case under one policy."""
    name = "prefix_aware" if policy == "oracle" else policy
    simulation = Simulation(case.topology._replace(policy=name), seed=case.seed)
    if policy == "oracle":
        simulation.dispatcher.start = Oracle(simulation).start
    return [sent.reply for sent in simulation.run(list(load(case)), Pace(speed=1.0)).requests]


class Prompt(NamedTuple):
    """A prompt on its way to an engine."""

    at: float
    engine: str
    size: int
    keys: Sequence[bytes]


class Oracle:
    """Starts each request where it waits least, by what queues and caches hold; as in `prefix_aware`, what is to be
    computed counts twice.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.dispatcher = simulation.dispatcher
        self.engines = [engine for engine in simulation.engines.values() if engine.role != "decode"]
        self.given: Counter[str] = Counter()
        self.sent: list[Prompt] = []

    def start(self, request: GenerateRequest) -> Generation:
        now = self.engines[0].loop.time()
        self.sent = [prompt for prompt in self.sent if prompt.at == now]
        prompt = Prompt(now, "", len(request.prompt_token_ids), self.dispatcher.holdings.of(request, now).keys)
        best = min(self.engines, key=lambda engine: (self.cost(engine, prompt), self.given[engine.name])).name
        self.given[best] += 1
        self.sent.append(prompt._replace(engine=best))
        return self.dispatcher.start_on(best, request)

    def cost(self, engine: SimulatedEngine, prompt: Prompt) -> float:
        """What is before its first token there, in prompt tokens of an engine of the usual speed."""
        scheduler, coming, work = engine.core.scheduler, set[bytes](), 0.0

        def lacking(size: int, keys: Sequence[bytes]) -> int:
            known = takewhile(lambda key: key in coming or scheduler.kv.pool.lookup(key) is not None, keys)
            num_known = HASH_BLOCK_SIZE * sum(1 for _ in known)
            coming.update(keys)
            return max(size - num_known, 1)

        for other in (*scheduler.running, *scheduler.waiting):
            size = len(other.prompt_token_ids)
            if other.num_computed >= size:
                work += CONTEXT_WEIGHT * size
                continue
            other.update_hash_keys(size, HASH_BLOCK_SIZE)
            new = lacking(size, other.hash_keys)
            work += size - other.num_computed if other.num_computed else new
        work += sum(lacking(other.size, other.keys) for other in self.sent if other.engine == engine.name)
        return (work + 2 * lacking(prompt.size, prompt.keys)) * engine.options.profile.prompt_token_s


def hits(replies: Sequence[Reply]) -> float:
    """The share of prompt tokens that were cached."""
    return sum(r.num_cached_tokens for r in replies) / sum(r.num_prompt_tokens for r in replies)


def at(times: Sequence[float], quantile: float) -> float:
    """A quantile."""
    return sorted(times)[int(len(times) * quantile)]


def run(context: Context) -> list[Claim]:
    """`prefix_aware` beside the oracle and `least_loaded`, with equal engines and with unequal ones."""
    claims = []
    for (workload, aggregated), rate in RATES.items():
        for unequal in (False, True):
            case = Case(workload, 0.9 * rate if unequal else rate, 100 if context.quick else 4000, aggregated, unequal)
            played = [play(policy, case) for policy in ("oracle", "prefix_aware", "least_loaded")]
            oracle, own, least = map(hits, played)
            oracle_s, own_s, least_s = (at([r.ttft for r in replies], 0.99) for replies in played)
            name = f"{workload}, {'aggregated' if aggregated else 'PD'}{', unequal engines' if unequal else ''}"
            seen = {"oracle_hits": oracle, "hits": own, "least_loaded_hits": least, "oracle_p99_s": oracle_s,
                    "p99_s": own_s, "least_loaded_p99_s": least_s, "requests_per_s": case.rate}  # fmt: skip
            if oracle:
                claims.append(Claim(f"{name}: hits / the oracle's", own / oracle, LEAST_HITS, "higher", seen))
            claims.append(Claim(f"{name}: p99 of TTFT / the oracle's", own_s / oracle_s, MOST_P99, "lower", seen))
    return claims


def report(replies: Sequence[Reply]) -> str:
    """Hits and times as columns."""
    columns = ([r.ttft for r in replies], [r.stamps[-1] - r.sent for r in replies])
    shown = (" / ".join(f"{at(times, quantile):.3f}" for quantile in QUANTILES) for times in columns)
    return f"{hits(replies):.3f} | {' | '.join(shown)}"


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
            print(f"| {rate:g} | {policy} | {report(play(policy, case))} |", flush=True)


if __name__ == "__main__":
    main()
