"""The price of the hand-off at concurrency 1: TTFT of 1P1D against one aggregated engine with as many threads, and, for
each connector, the gap from the first to the second token against a decode step and the bare copy of the prompt's KV.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

from benchmarks.load import measure
from benchmarks.models import find_model
from benchmarks.report import Claim, Context
from benchmarks.servers import Server, pdkv
from benchmarks.versus import INPUT_LEN, workload
from pdkv.bench.client import Reply
from pdkv.connector_kit.bench.plan import BEYOND_CACHE_BYTES, parse_layout
from pdkv.connector_kit.bench.turns import Spread, take_turns
from pdkv.connector_kit.bench.yardsticks import Memcpy

OPTIONS = ("--threads", "2", "--kv-cache-memory", "512MiB")
TTFT_LIMIT = 1.1
DIGEST_LIMIT = 1.02
COPY_FACTOR, SLACK_S = 1.2, 3e-3
CONNECTORS: Mapping[str, Sequence[str]] = {
    "shared_memory": (),
    "nixl pull": ("--connector", "nixl"),
    "nixl push": ("--connector", "nixl", "--connector-config", "mode=push"),
    "p2p": ("--connector", "p2p"),
}
"""What engines of each are told; the first one is the default."""


def run(context: Context, size: str) -> list[Claim]:
    """TTFT with the default connector, and the gap with each connector, where the model is not a tiny one."""
    model = find_model(context.models, size)
    default, *others = CONNECTORS
    claims = _ttft_and_gap(context, size, model, default)
    for name in others if size != "tiny" else ():
        with pdkv(model, prefill=1, decode=1, options=(*OPTIONS, *CONNECTORS[name])) as split:
            claims.append(_gap(size, name, _rounds(context, size, split)))
    return claims


def _ttft_and_gap(context: Context, size: str, model: Path, name: str) -> list[Claim]:
    with (
        pdkv(model, prefill=1, decode=1, options=(*OPTIONS, *CONNECTORS[name])) as split,
        pdkv(model, prefill=0, decode=1, options=OPTIONS) as aggregated,
    ):
        rounds = _rounds(context, size, split, aggregated)
    ttfts = {who: [[reply.ttft for reply in replies] for replies in each] for who, each in rounds.items()}
    figures = {f"{who} ms": median(chain.from_iterable(each)) * 1e3 for who, each in ttfts.items()}
    ratio = Spread.of_ratios(*(list(map(median, ttfts[who])) for who in ("1P1D", "aggregated")))
    return [Claim.of(f"{size}, TTFT", ratio, TTFT_LIMIT, "lower", figures), _gap(size, name, rounds)]


def run_digests(context: Context) -> list[Claim]:
    """Time to the second token, the first one that decode computes, with digests of what is handed off and without."""
    model = find_model(context.models, "tiny" if context.quick else "mid")
    num_requests, count = (2, 1) if context.quick else (5, 9)
    claims = []
    for name, connector in list(CONNECTORS.items())[: 1 if context.quick else None]:
        with ExitStack() as stack:
            servers = {
                mode: stack.enter_context(
                    pdkv(model, prefill=1, decode=1, options=(*OPTIONS, *connector, "--kv-checksum", mode))
                )
                for mode in ("on", "off")
            }
            for server in servers.values():
                _second_token_s(server, 3)  # warm
            work = {mode: partial(_second_token_s, server, num_requests) for mode, server in servers.items()}
            took = take_turns(work, count, warm=0)
        ratio = Spread.of_ratios(took["on"], took["off"])
        figures = {f"{mode} ms": median(each) * 1e3 for mode, each in took.items()}
        claims.append(Claim.of(f"{name}, time to decode's first token, with digests / without", ratio, DIGEST_LIMIT,
                               "lower", figures))  # fmt: skip
    return claims


def _second_token_s(server: Server, num_requests: int) -> float:
    """Median over some requests, one at a time."""
    load = workload(num_requests, 1)._replace(output_len=(4, 4))
    return median(reply.ttft + reply.gaps[0] for reply in measure(server.url, server.model, load).replies)


Rounds = Mapping[str, Sequence[Sequence[Reply]]]
"""Each round's replies of "1P1D" and, where it takes turns with an aggregated engine, of "aggregated"."""


def _rounds(context: Context, size: str, split: Server, aggregated: Server | None = None) -> Rounds:
    num_requests, count = (2, 1) if context.quick else (5, 8 if size == "tiny" else 6)
    servers = {"1P1D": split} | ({"aggregated": aggregated} if aggregated is not None else {})
    for server in servers.values():
        _send(server, 3)  # warm
    return take_turns({who: partial(_send, server, num_requests) for who, server in servers.items()}, count, warm=0)


def _gap(size: str, name: str, rounds: Rounds) -> Claim:
    """From the first to the second token, and what it may be: a step of the same round, and a copy."""
    copy = _copy_seconds(size)
    gaps = [median(reply.gaps[0] for reply in each) for each in rounds["1P1D"]]
    steps = [median(later for reply in each for later in reply.gaps[1:]) for each in rounds["1P1D"]]
    ratio = Spread.of_ratios(gaps, [step + COPY_FACTOR * copy + SLACK_S for step in steps])
    figures = {"gap ms": median(gaps) * 1e3, "step ms": median(steps) * 1e3, "copy ms": copy * 1e3}
    return Claim.of(f"{size}, {name}, first to second token, of what is allowed", ratio, 1.0, "lower", figures)


def _send(server: Server, num_requests: int) -> list[Reply]:
    return measure(server.url, server.model, workload(num_requests, 1)).replies


def _copy_seconds(size: str) -> float:
    """One memcpy of the prompt's KV, by one thread."""
    layout = parse_layout(size).layout()
    memcpy = Memcpy(-(-INPUT_LEN // layout.block_size) * layout.block_bytes, BEYOND_CACHE_BYTES)
    return median([memcpy.seconds() for _ in range(18)][9:])
