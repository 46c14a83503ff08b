"""What finding KV again is worth: a hit in each tier below the pool, and conversations that overflow the pool."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from statistics import mean

from benchmarks import layerwise
from benchmarks.conversations import make_turns, play
from benchmarks.layerwise import send_prompt
from benchmarks.load import random_prompt
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import metric, pdkv
from benchmarks.support import redis_server, support_module
from pdkv.connector_kit.bench.plan import make_plan, open_setting
from pdkv.connector_kit.bench.yardsticks import measure_bare

TOKENS = 4096
POOL_TOKENS, TOKEN_BYTES = 8192, 32 << 10
"""Bytes of the device's pool, and of mid's KV of a token."""

CONVERSATIONS, TURNS = 16, 16
"""Turns of conversations with about 2,000 tokens in the end: four times the pool."""

LIMIT = 0.25


def run_hits(context: Context) -> list[Claim]:
    """TTFT of a prompt whose first 4k tokens are in a tier or at a peer, beside a local hit and the bytes alone."""
    claims = [_in_host_memory(context)]
    with _tiers() as tiers:
        for where, url in tiers.items():
            claims += layerwise.run(context, url, where=where, tokens=TOKENS, cut={"load": "async"})
    return [*claims, _at_a_peer(context)]


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
            reply = send_prompt(server, prompt + random_prompt(rng, layerwise.SUFFIX))
            send_prompt(server, random_prompt(rng, layerwise.SUFFIX))
            return reply.ttft

        for prompt in prompts:  # the last ones are there so that the others have been saved
            ask(prompt)
        send_prompt(server, random_prompt(rng, layerwise.SUFFIX))  # the other engine's turn
        for turn, prompt in enumerate(prompts[:-1]):
            from_host, from_pool = ask(prompt), ask(prompt)
            if turn:
                read.append(from_host)
                local.append(from_pool)
        num_hits = metric(server, "pdkv_connector_tier_hits_total")
    if num_hits < (rounds + 1) * prefix // 64:
        raise RuntimeError(f"{num_hits:.0f} values were read from host memory")
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm") as memory:
        plan = make_plan("store", options={"url": f"host://{memory}/kv"}, layout="mid", tokens=[prefix])
        with open_setting(plan) as setting:
            bare = measure_bare(plan, setting, prefix, rounds)
    return layerwise.claim_of_hits(f"{prefix} tokens in host memory", read, local, bare)


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
            _, read, *there = (send_prompt(server, prompt + random_prompt(rng, layerwise.SUFFIX)) for _ in range(4))
            if turn:
                borrowed.append(read.ttft)
                local += [reply.ttft for reply in there]
        num_read = metric(server, "pdkv_kv_loans_total")
    if num_read != rounds + 1:
        raise RuntimeError(f"{num_read:.0f} of {rounds + 1} prompts were borrowed")
    plan = make_plan("nixl", options={}, layout="mid", tokens=[prefix])
    with open_setting(plan) as setting:
        bare = measure_bare(plan, setting, prefix, rounds)
    return layerwise.claim_of_hits(f"{prefix} tokens at a peer, over nixl", borrowed, local, bare)


def run_turns(context: Context) -> list[Claim]:
    """Mean TTFT of conversations whose KV is four times the pool, with a host tier / without; rounds take turns."""
    model = find_model(context.models, "tiny" if context.quick else "mid")
    pool = str(POOL_TOKENS * TOKEN_BYTES) if not context.quick else "8MiB"
    count, turns = (2, 2) if context.quick else (CONVERSATIONS, TURNS)
    plan = make_turns(1, count, turns)
    options = {"none": (), "host tier": ("--kv-host-memory", "4GiB", "--connector-config", "store.load=layerwise")}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                pdkv(model, prefill=0, decode=1, options=("--threads", "2", "--kv-cache-memory", pool, *flags))
            )
            for name, flags in options.items()
        }
        times = play(servers, plan)
    means = {name: mean(each) for name, each in times.items()}
    figures = {f"{name} ms": each * 1e3 for name, each in means.items()}
    title = f"mid, {count} conversations of {turns} turns, KV 4x the pool, mean TTFT with a host tier / without"
    return [Claim(title, means["host tier"] / means["none"], LIMIT, "lower", figures)]


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
