"""What finding KV again is worth: a hit in each tier below the pool, and conversations that overflow the pool.

Lengths of conversations are as in ShareGPT: short questions, longer answers, both log-normal.
"""

import asyncio
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from statistics import mean, median

from benchmarks.load import complete, random_prompt
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, metric, pdkv
from benchmarks.support import redis_server, support_module
from pdkv.bench.client import Client, Reply
from pdkv.bench.serve import Conversation, Target, run_loop
from pdkv.bench.workload import Session, Turn
from pdkv.connector_kit.bench.plan import make_plan, open_setting
from pdkv.connector_kit.bench.yardsticks import measure_bare

TOKENS = 4096
POOL_TOKENS, TOKEN_BYTES = 8192, 32 << 10
"""Bytes of the device's pool, and of mid's KV of a token."""

CONVERSATIONS, TURNS = 16, 16
"""Turns of conversations with about 2,000 tokens in the end: four times the pool."""

QUESTION, ANSWER = (40.0, 0.9), (90.0, 0.7)
"""Tokens of a question and of an answer: the median, and sigma of the logarithm."""

LONGEST = 400
LIMIT = 0.25
SUFFIX = 64
HIT_LIMIT = 1.1


def run_hits(context: Context) -> list[Claim]:
    """TTFT of a prompt whose first 4k tokens are in a tier or at a peer, beside a local hit and the bytes alone."""
    claims = [_in_host_memory(context)]
    with _tiers() as tiers:
        for where, url in tiers.items():
            claims.append(_in_store(context, where, url))
    return [*claims, _at_a_peer(context)]


def _in_store(context: Context, where: str, url: str) -> Claim:
    """Two deployments that share a store: one computes the prompts, the other has never seen them."""
    prefix, rounds = (256, 2) if context.quick else (TOKENS, 7)
    model = find_model(context.models, "tiny" if context.quick else "mid")
    options = (
        "--threads", "2", "--kv-cache-memory", "1GiB", "--connector", "store", "--connector-config", f"url={url}",
    )  # fmt: skip
    rng = random.Random(1)
    stored, local = [], []
    with (
        pdkv(model, prefill=0, decode=1, options=options) as computes,
        pdkv(model, prefill=0, decode=1, options=options) as loads,
    ):
        prefixes = [random_prompt(rng, prefix) for _ in range(rounds + 2)]
        for prompt in prefixes:  # the last ones are there so that the others have been saved
            _send_prompt(computes, prompt + random_prompt(rng, SUFFIX))
        for turn, prompt in enumerate(prefixes[:-1]):
            from_store = _send_prompt(loads, prompt + random_prompt(rng, SUFFIX))
            from_pool = _send_prompt(loads, prompt + random_prompt(rng, SUFFIX))
            if turn:
                stored.append(from_store.ttft)
                local.append(from_pool.ttft)
    return _claim_of_hits(f"{prefix} tokens in {where}", stored, local, "store", {"url": url}, prefix)


def _claim_of_hits(
    what: str,
    stored: Sequence[float],
    local: Sequence[float],
    connector: str,
    options: Mapping[str, str],
    num_tokens: int,
) -> Claim:
    """TTFT of hits, in seconds, beside hits in the engine's own pool and as many tokens' bytes at bare speed."""
    plan = make_plan(connector, options=options, layout="mid", tokens=[num_tokens])
    with open_setting(plan) as setting:
        bare_s = measure_bare(plan, setting, num_tokens, len(stored))
    hit, there = median(stored), median(local)
    figures = {"ms": hit * 1e3, "local ms": there * 1e3, "bare load ms": bare_s * 1e3}
    title = f"mid, TTFT with {what} / (its bytes alone + a hit in the pool)"
    return Claim(title, hit / (bare_s + there), HIT_LIMIT, "lower", figures)


def _send_prompt(server: Server, prompt: list[int]) -> Reply:
    """Two tokens behind a prompt. Raises RuntimeError where there are none."""
    reply = run_loop(complete(server.url, model=server.model, prompt=prompt, max_tokens=2))
    if not reply.ok:
        raise RuntimeError(f"a request failed: {reply.error}")
    return reply


def _in_host_memory(context: Context) -> Claim:
    """Two engines of one launch in turn: one computes the prompts, the other reads them from its host memory."""
    prefix, rounds = (256, 2) if context.quick else (TOKENS, 7)
    model = find_model(context.models, "tiny" if context.quick else "mid")
    options = ("--threads", "2", "--kv-cache-memory", "1GiB", "--kv-host-memory", "3GiB", "--connector", "nixl")
    options += ("--policy", "round_robin")
    rng = random.Random(1)
    prompts = [random_prompt(rng, prefix) for _ in range(rounds + 2)]
    read, local = [], []
    with pdkv(model, prefill=0, decode=2, options=options) as server:

        def ask(prompt: list[int]) -> float:
            """TTFT on the engine whose turn it is; then the other one's turn passes."""
            reply = _send_prompt(server, prompt + random_prompt(rng, SUFFIX))
            _send_prompt(server, random_prompt(rng, SUFFIX))
            return reply.ttft

        for prompt in prompts:  # the last ones are there so that the others have been saved
            ask(prompt)
        _send_prompt(server, random_prompt(rng, SUFFIX))  # the other engine's turn
        for turn, prompt in enumerate(prompts[:-1]):
            from_host, from_pool = ask(prompt), ask(prompt)
            if turn:
                read.append(from_host)
                local.append(from_pool)
        num_hits = metric(server, "pdkv_connector_tier_hits_total")
    if num_hits < (rounds + 1) * prefix // 64:
        raise RuntimeError(f"{num_hits:.0f} values were read from host memory")
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm") as memory:
        url = {"url": f"host://{memory}/kv"}
        return _claim_of_hits(f"{prefix} tokens in host memory", read, local, "store", url, prefix)


def _at_a_peer(context: Context) -> Claim:
    """Two prefill engines in turn: the first computes a prompt, the second borrows it, then both have it."""
    prefix, rounds = (256, 2) if context.quick else (TOKENS, 7)
    model = find_model(context.models, "tiny" if context.quick else "mid")
    options = ("--threads", "2", "--kv-cache-memory", "1GiB", "--connector", "nixl")
    options += ("--policy", "round_robin", "--kv-reuse", "always")
    rng = random.Random(1)
    borrowed, local = [], []
    with pdkv(model, prefill=2, decode=1, options=options) as server:
        for turn in range(rounds + 1):
            prompt = random_prompt(rng, prefix)
            _, read, *there = (_send_prompt(server, prompt + random_prompt(rng, SUFFIX)) for _ in range(4))
            if turn:
                borrowed.append(read.ttft)
                local += [reply.ttft for reply in there]
        num_read = metric(server, "pdkv_kv_loans_total")
    if num_read != rounds + 1:
        raise RuntimeError(f"{num_read:.0f} of {rounds + 1} prompts were borrowed")
    return _claim_of_hits(f"{prefix} tokens at a peer, over nixl", borrowed, local, "nixl", {}, prefix)


def run_turns(context: Context) -> list[Claim]:
    """Mean TTFT of conversations whose KV is four times the pool, with a host tier / without; rounds take turns."""
    model = find_model(context.models, "tiny" if context.quick else "mid")
    pool = str(POOL_TOKENS * TOKEN_BYTES) if not context.quick else "8MiB"
    count, turns = (2, 2) if context.quick else (CONVERSATIONS, TURNS)
    plan = _make_turns(1, count, turns)
    options = {"none": (), "host tier": ("--kv-host-memory", "4GiB", "--connector-config", "store.load=layerwise")}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                pdkv(model, prefill=0, decode=1, options=("--threads", "2", "--kv-cache-memory", pool, *flags))
            )
            for name, flags in options.items()
        }
        times = _play(servers, plan)
    means = {name: mean(each) for name, each in times.items()}
    figures = {f"{name} ms": each * 1e3 for name, each in means.items()}
    title = f"mid, {count} conversations of {turns} turns, KV 4x the pool, mean TTFT with a host tier / without"
    return [Claim(title, means["host tier"] / means["none"], LIMIT, "lower", figures)]


def _make_turns(seed: int, num_conversations: int, num_turns: int) -> list[Session]:
    """The turns of each conversation; equal seeds make equal ones."""
    rng = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(1, min(LONGEST, round(median * rng.lognormvariate(0.0, sigma))))

    return [
        Session([Turn(random_prompt(rng, length(*QUESTION)), length(*ANSWER)) for _ in range(num_turns)])
        for _ in range(num_conversations)
    ]


def _play(servers: Mapping[str, Server], plan: Sequence[Session], at_once: int = 2) -> dict[str, list[float]]:
    """All conversations on each server, so many turns at a time; rounds of one turn each alternate between the servers.

    Returns:
        TTFT of each turn in seconds, by server.
    """
    talks = {name: [Conversation("completions", is_talk=True) for _ in plan] for name in servers}
    times: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(len(plan[0].turns)):
        turns = [session.turns[number] for session in plan]
        for name in sorted(servers, reverse=number % 2 == 0):
            times[name] += run_loop(_play_round(servers[name], talks[name], turns, at_once))
    return times


async def _play_round(
    server: Server, talks: Sequence[Conversation], turns: Sequence[Turn], at_once: int
) -> list[float]:
    """One turn of each; TTFT in seconds, in their order. Raises RuntimeError where one fails."""
    gate = asyncio.Semaphore(at_once)

    async def one(talk: Conversation, turn: Turn) -> float:
        async with gate:
            talk.ask(turn.prompt)
            reply = Reply(keep_text=True)
            with Client(server.url) as client:
                await client.stream("/v1/completions", talk.body(Target(server.url, server.model), turn), reply)
            if not reply.ok or len(reply.token_ids) != turn.max_tokens:
                raise RuntimeError(f"a turn failed: {reply.error}, {len(reply.token_ids)} of {turn.max_tokens} tokens")
            talk.answer(reply)
            return reply.ttft

    return list(await asyncio.gather(*map(one, talks, turns)))


@contextmanager
def _tiers() -> Iterator[dict[str, str]]:
    """URLs of the tiers that can be measured here, by what they are called."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdkv-bench-"))
        tiers = {"files": f"file://{folder}/kv"}
        servers = support_module("store_servers")
        with suppress(RuntimeError):
            tiers["Redis"] = stack.enter_context(redis_server())
        for name, make in (
            ("a bucket (moto)", servers.S3Server),
            ("Mooncake", lambda: servers.MooncakeServer(3 << 30)),
        ):
            with suppress(servers.pytest.skip.Exception):
                tiers[name] = stack.enter_context(make()).url
        yield tiers
