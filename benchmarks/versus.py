"""Throughput of two servers beside each other: rounds alternate between them, so that both see the same machine.

One engine stands against vLLM's CPU build on the same cores, and 1P1D over shared memory against vLLM's over NIXL, one
core for each engine: output tokens a second, 512 tokens in, 64 out.
"""

from functools import partial
from itertools import count
from statistics import median
from typing import NamedTuple

from benchmarks.load import Workload, measure
from benchmarks.models import find_model
from benchmarks.peers import vllm, vllm_pd
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, pdkv
from pdkv.connector_kit.bench.turns import Spread, take_turns
from pdkv.host.processor import emulates_bfloat16, instruction_set

INPUT_LEN = 512
OUTPUT_LEN = 64

LIMITS = {"tiny": {1: 1.5, 8: 1.5, 32: 1.4}, "mid": {1: 1.5, 8: 1.8, 32: 2.2}, "moe": {1: 1.0, 8: 1.0}}
"""By model and concurrency, where both compute in bfloat16 with the processor's instructions for it."""

LIMITS_IN_FLOAT32 = LIMITS | {"mid": {1: 1.2, 8: 1.5, 32: 1.5}}
PD_LIMITS = {8: 2.0, 32: 2.0}
MEMORY = ("--kv-cache-memory", "2GiB")  # what vLLM gets too

_seeds = count(1)
"""Every workload has prompts of its own: nothing is found in a prefix cache."""


class Versus(NamedTuple):
    """Medians over the rounds."""

    ratio: float  # of the rounds' ratios, ours to theirs
    ours: float  # output tokens a second
    theirs: float


def workload(num_requests: int, concurrency: int) -> Workload:
    """A closed loop of 512 tokens in, 64 out, with new prompts."""
    return Workload(num_requests, INPUT_LEN, (OUTPUT_LEN, OUTPUT_LEN), concurrency, seed=next(_seeds))


def throughput(server: Server, load: Workload) -> float:
    """Output tokens a second. Raises RuntimeError if a request failed."""
    run = measure(server.url, server.model, load)
    return sum(reply.num_tokens for reply in run.replies) / run.wall_s


def compare(ours: Server, theirs: Server, *, concurrency: int, num_requests: int, rounds: int) -> Versus:
    """Warm both up, then alternate; the one that begins changes every round."""
    for server in (ours, theirs):
        throughput(server, workload(concurrency, concurrency))

    def rate(server: Server) -> float:
        return throughput(server, workload(num_requests, concurrency))

    rates = take_turns({"ours": partial(rate, ours), "theirs": partial(rate, theirs)}, rounds, warm=0)
    ratio = Spread.of_ratios(rates["ours"], rates["theirs"]).median
    return Versus(ratio, median(rates["ours"]), median(rates["theirs"]))


def run_engine(context: Context, size: str) -> list[Claim]:
    """One engine against vLLM's; one claim per concurrency."""
    assert context.vllm is not None
    model = find_model(context.models, size)
    limits = LIMITS_IN_FLOAT32 if emulates_bfloat16() else LIMITS
    claims = []
    with vllm(context.vllm, model) as theirs, pdkv(model, prefill=0, decode=1, options=MEMORY) as ours:
        for concurrency, limit in limits[size].items():
            rounds = 5 if size == "tiny" else 3
            num_requests = 8 * concurrency if size == "tiny" else max(concurrency, 4)
            title = f"{size}, concurrency {concurrency}, {instruction_set()}"
            claims.append(_claim(context, title, ours, theirs, limit, concurrency, num_requests, rounds))
    return claims


def run_pd(context: Context, size: str) -> list[Claim]:
    """1P1D against vLLM's; one claim per concurrency."""
    assert context.vllm is not None
    model = find_model(context.models, size)
    with (
        vllm_pd(context.vllm, model) as theirs,
        pdkv(model, prefill=1, decode=1, options=["--threads", "1", *MEMORY]) as ours,
    ):
        return [
            _claim(context, f"{size}, concurrency {concurrency}", ours, theirs, limit, concurrency, 4 * concurrency, 4)
            for concurrency, limit in PD_LIMITS.items()
        ]


def _claim(
    context: Context, title: str, ours: Server, theirs: Server, limit: float, concurrency: int, num: int, rounds: int
) -> Claim:
    num_requests, rounds = (concurrency, 1) if context.quick else (num, rounds)
    found = compare(ours, theirs, concurrency=concurrency, num_requests=num_requests, rounds=rounds)
    return Claim(title, found.ratio, limit, "higher", {"pdkv tok/s": found.ours, "vllm tok/s": found.theirs})
