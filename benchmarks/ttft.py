"""The price of the hand-off at concurrency 1: TTFT of 1P1D against one aggregated engine with as many threads, and the
gap from the first to the second token against a decode step and the bare copy of the prompt's KV.
"""

from statistics import median

from benchmarks.client import Reply
from benchmarks.load import run as run_loop
from benchmarks.load import send_all
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, pdkv
from benchmarks.versus import INPUT_LEN, workload
from pdkv.connector_kit.bench.layouts import parse_layout
from pdkv.connector_kit.bench.plan import BEYOND_CACHE_BYTES
from pdkv.connector_kit.bench.yardsticks import Memcpy

THREADS = 2
TTFT_LIMIT = 1.1
COPY_FACTOR, SLACK_S = 1.2, 3e-3


def run(context: Context, size: str) -> list[Claim]:
    """Two claims."""
    model = find_model(context.models, size)
    options = ("--threads", str(THREADS), "--kv-cache-memory", "512MiB")
    num_requests, rounds = (2, 1) if context.quick else (5, 8 if size == "tiny" else 4)
    split_replies: list[Reply] = []
    aggregated_replies: list[Reply] = []
    with (
        pdkv(model, prefill=1, decode=1, options=options) as split,
        pdkv(model, prefill=0, decode=1, options=options) as aggregated,
    ):
        for server in (split, aggregated):
            _send(server, 3)  # warm
        for _ in range(rounds):
            split_replies += _send(split, num_requests)
            aggregated_replies += _send(aggregated, num_requests)
    ttft = median(reply.ttft for reply in split_replies)
    aggregated_ttft = median(reply.ttft for reply in aggregated_replies)
    gap = median(reply.gaps[0] for reply in split_replies)
    step = median(later for reply in split_replies for later in reply.gaps[1:])
    copy = _copy_seconds(size)
    allowed = step + COPY_FACTOR * copy + SLACK_S
    return [
        Claim(
            f"{size}, TTFT",
            ttft / aggregated_ttft,
            TTFT_LIMIT,
            "lower",
            {"1P1D ms": ttft * 1e3, "aggregated ms": aggregated_ttft * 1e3},
        ),
        Claim(
            f"{size}, first to second token, of what is allowed",
            gap / allowed,
            1.0,
            "lower",
            {"gap ms": gap * 1e3, "step ms": step * 1e3, "copy ms": copy * 1e3, "allowed ms": allowed * 1e3},
        ),
    ]


def _send(server: Server, num_requests: int) -> list[Reply]:
    replies, _ = run_loop(send_all(server.url, server.model, workload(num_requests, 1)))
    errors = [reply.error for reply in replies if reply.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(replies)} requests failed: {errors[0]}")
    result: list[Reply] = replies
    return result


def _copy_seconds(size: str) -> float:
    """One memcpy of the prompt's KV, by one thread."""
    layout = parse_layout(size).layout()
    memcpy = Memcpy(-(-INPUT_LEN // layout.block_size) * layout.block_bytes, BEYOND_CACHE_BYTES)
    return median([memcpy.seconds() for _ in range(18)][9:])
