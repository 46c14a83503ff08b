"""What finding KV again is worth: a hit in each tier below the pool, and conversations that overflow the pool."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import mean

from benchmarks import layerwise, s3_server
from benchmarks.conversations import Conversation, make_turns, play_round
from benchmarks.load import run as run_loop
from benchmarks.models import find_model
from benchmarks.redis_server import find_binary, redis_server
from benchmarks.report import Claim, Context
from benchmarks.servers import pdkv

TOKENS = 4096
POOL_TOKENS, TOKEN_BYTES = 8192, 32 << 10
"""Of the device's pool, and mid's KV of a token."""

CONVERSATIONS, TURNS = 16, 16
"""Of about 2,000 tokens in the end: four times the pool."""

LIMIT = 0.25


def run_hits(context: Context) -> list[Claim]:
    """TTFT of a prompt whose first 4k tokens are in a tier, beside a hit in the pool and the bytes at bare speed."""
    claims = []
    with _tiers() as tiers:
        for where, url in tiers.items():
            claims += layerwise.run(context, url, where=where, tokens=TOKENS)
    return claims


def run_turns(context: Context) -> list[Claim]:
    """Mean TTFT of conversations whose KV is four times the pool, with a host tier / without; rounds take turns."""
    model = find_model(context.models, "tiny" if context.quick else "mid")
    pool = str(POOL_TOKENS * TOKEN_BYTES) if not context.quick else "8MiB"
    count, turns = (2, 2) if context.quick else (CONVERSATIONS, TURNS)
    plan = make_turns(1, count, turns)
    options = {"none": (), "host tier": ("--kv-host-memory", "4GiB", "--connector-config", "store.load=layerwise")}
    times: dict[str, list[float]] = {name: [] for name in options}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                pdkv(model, prefill=0, decode=1, options=("--threads", "2", "--kv-cache-memory", pool, *flags))
            )
            for name, flags in options.items()
        }
        talks = {name: [Conversation(each) for each in plan] for name in servers}
        for turn in range(turns):
            for name in sorted(servers, reverse=turn % 2 == 0):
                times[name] += run_loop(play_round(servers[name], talks[name], at_once=2))
    means = {name: mean(each) for name, each in times.items()}
    figures = {f"{name} ms": each * 1e3 for name, each in means.items()}
    title = f"mid, {count} conversations of {turns} turns, KV 4x the pool, mean TTFT with a host tier / without"
    return [Claim(title, means["host tier"] / means["none"], LIMIT, "lower", figures)]


@contextmanager
def _tiers() -> Iterator[dict[str, str]]:
    """URLs of the tiers that can be measured here, by what they are called."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdkv-bench-"))
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdkv-bench-", dir="/dev/shm"))
        tiers = {"host memory": f"host://{memory}/kv?capacity=3GiB", "files": f"file://{folder}/kv"}
        if find_binary() is not None:
            tiers["Redis"] = stack.enter_context(redis_server())
        if s3_server.is_installed():
            tiers["a bucket (moto)"] = stack.enter_context(s3_server.s3_server())
        yield tiers
