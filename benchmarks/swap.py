"""What it is worth to read the KV of preempted requests from host memory instead of computing it again."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count

from benchmarks.load import Workload
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import metric, pdkv
from benchmarks.versus import throughput
from pdkv.connector_kit.bench.turns import Spread, take_turns

POOL = "128MiB"
"""4,096 tokens of mid's KV, which has 32 KiB a token."""

BURST, INPUT_LEN, OUTPUT_LEN = 12, 512, 448
"""At the end of the longest 11,520 tokens, and at admission 6,144: nearly all are preempted, some more than once."""

LIMIT = 1.2


def run(context: Context) -> list[Claim]:
    """Output tokens a second of bursts that preempt: `auto` / `recompute`, both with host memory; rounds take turns."""
    model = find_model(context.models, "tiny" if context.quick else "mid")
    burst, output_len, rounds = (4, 16, 1) if context.quick else (BURST, OUTPUT_LEN, 5)
    shared = ("--threads", "2", "--kv-cache-memory", "8MiB" if context.quick else POOL, "--kv-host-memory", "2GiB")
    with ExitStack() as stack:
        servers = {
            policy: stack.enter_context(pdkv(model, prefill=0, decode=1, options=(*shared, "--preemption", policy)))
            for policy in ("auto", "recompute")
        }

        def rate(policy: str, seeds: Iterator[int]) -> float:
            load = Workload(burst, INPUT_LEN, (output_len,) * 2, burst, seed=next(seeds))
            return throughput(servers[policy], load)

        rates = take_turns({policy: partial(rate, policy, count()) for policy in servers}, rounds)
        preempted = {
            f"{policy}, preemptions": metric(server, "pdkv_engine_preemptions_total")
            for policy, server in servers.items()
        }
    ratio = Spread.of_ratios(rates["auto"], rates["recompute"])
    figures = {f"{policy} tok/s": Spread.of(found).median for policy, found in rates.items()}
    title = (
        f"mid, bursts of {burst} x {INPUT_LEN} in, {output_len} out in 4,096 tokens of pool: read again / recomputed"
    )
    return [Claim.of(title, ratio, LIMIT, "higher", figures | preempted)]
