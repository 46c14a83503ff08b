"""A layerwise load behind the layers that compute: TTFT with a hit in a store, against the bare load and a local hit.

Two deployments share a store. The first one computes prompts, the second one has never seen them.
"""

import random
from collections.abc import Mapping, Sequence
from statistics import median

from benchmarks.client import Reply, complete
from benchmarks.load import random_prompt
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, pdkv
from pdkv.bench.serve import run_loop
from pdkv.connector_kit.bench.plan import make_plan, open_setting
from pdkv.connector_kit.bench.yardsticks import measure_bare

PREFIX = 2048
SUFFIX = 64
FACTOR, SLACK_S = 1.15, 3e-3


def run(
    context: Context, url: str, *, where: str = "the store", tokens: int = PREFIX, cut: Mapping[str, str] | None = None
) -> list[Claim]:
    """One claim. `where`: what the store is called in it. `cut`: options of the store connector."""
    cut = {"load": "layerwise"} | dict(cut or {})
    prefix, rounds = (256, 2) if context.quick else (tokens, 7)
    model = find_model(context.models, "tiny" if context.quick else "mid")
    options = ("--threads", "2", "--kv-cache-memory", "1GiB", "--connector", "store")
    options += ("--connector-config", f"url={url}", *(f"{k}={v}" for k, v in cut.items()))
    rng = random.Random(1)
    stored, local = [], []
    with (
        pdkv(model, prefill=0, decode=1, options=options) as computes,
        pdkv(model, prefill=0, decode=1, options=options) as loads,
    ):
        prefixes = [random_prompt(rng, prefix) for _ in range(rounds + 2)]
        for prompt in prefixes:  # the last ones are there so that the others have been saved
            send_prompt(computes, prompt + random_prompt(rng, SUFFIX))
        for turn, prompt in enumerate(prefixes[:-1]):
            from_store = send_prompt(loads, prompt + random_prompt(rng, SUFFIX))
            from_pool = send_prompt(loads, prompt + random_prompt(rng, SUFFIX))
            if turn:
                stored.append(from_store.ttft)
                local.append(from_pool.ttft)
    plan = make_plan("store", options={"url": url, **cut}, layout="mid", tokens=[prefix])
    with open_setting(plan) as setting:
        bare = measure_bare(plan, setting, prefix, rounds)
    return [claim_of_hits(f"{prefix} tokens in {where}", stored, local, bare)]


def claim_of_hits(what: str, stored: Sequence[float], local: Sequence[float], bare_s: float) -> Claim:
    """TTFT of hits, in seconds, beside hits in the engine's own pool and the bytes at bare speed."""
    hit, there = median(stored), median(local)
    allowed = FACTOR * max(bare_s, there) + SLACK_S
    figures = {"ms": hit * 1e3, "local ms": there * 1e3, "bare load ms": bare_s * 1e3, "allowed ms": allowed * 1e3}
    return Claim(f"mid, TTFT with {what}, of what is allowed", hit / allowed, 1.0, "lower", figures)


def send_prompt(server: Server, prompt: list[int]) -> Reply:
    """Two tokens behind a prompt. Raises RuntimeError where there are none."""
    reply = run_loop(complete(server.url, model=server.model, prompt=prompt, max_tokens=2))
    if not reply.ok:
        raise RuntimeError(f"a request failed: {reply.error}")
    return reply
