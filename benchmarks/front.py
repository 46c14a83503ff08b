"""What the router costs, all limits on: CPU of tokens.

It stands in front of a paced engine, which computes nothing: more streams than this machine could compute, and CPU time
of the router's process, which says nearly the same beside other work.
"""

from statistics import median
from typing import NamedTuple

from benchmarks.load import Workload, measure
from benchmarks.report import Claim, Context
from benchmarks.router_alone import router_alone
from pdkv.host.sockets import raise_open_files_limit

TOKEN_LIMITS_US = {64: 40.0, 1000: 30.0}
DISPATCHER_US, TOGETHER_LIMIT = 8.0, 1.15


def run(context: Context) -> list[Claim]:
    """Two claims of tokens, four of fronts."""
    raise_open_files_limit()
    return [
        *(_tokens(num_streams, context.quick) for num_streams in TOKEN_LIMITS_US),
        *(claim for num_streams in TOKEN_LIMITS_US for claim in fronts(num_streams, context.quick)),
    ]


# --- tokens -------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """The shape of requests."""

    input_len: int
    output_len: tuple[int, int]


LONG, SHORT = Shape(10, (20, 500)), Shape(512, (64, 64))
"""Long answers to short prompts, and the lengths of most other benchmarks."""


def _tokens(num_streams: int, quick: bool) -> Claim:
    """Router CPU a token, what requests cost included; `num_streams` at once get a token each per step."""
    shapes = {"us": LONG, "us of 512 in, 64 out": SHORT}
    figures = {name: _cost(num_streams, shape, quick).router for name, shape in shapes.items()}
    limit = TOKEN_LIMITS_US[num_streams]
    title = f"router CPU a token, {num_streams} streams of 10 in, 20 to 500 out / {limit:g} us"
    return Claim(title, figures["us"] / limit, 1.0, "lower", figures)


class Cost(NamedTuple):
    """CPU microseconds a token."""

    router: float  # or dispatcher
    fronts: float


def _cost(num_streams: int, shape: Shape, quick: bool, num_fronts: int = 0) -> Cost:
    pace_s = 0.02 if num_streams < 256 else 0.1
    num_requests, lengths = (num_streams, (8, 8)) if quick else (2 * num_streams, shape.output_len)
    with router_alone(pace_s=pace_s, num_seqs=2 * num_streams, num_fronts=num_fronts) as router:
        load = Workload(num_requests, shape.input_len, lengths, num_streams, seed=num_streams)
        measure(router.url, router.model, Workload(64, shape.input_len, (20, 20), 64))  # warm
        began = router.cpu_seconds(), router.fronts_cpu_seconds()
        replies = measure(router.url, router.model, load).replies
        used = router.cpu_seconds() - began[0], router.fronts_cpu_seconds() - began[1]
    num_tokens = sum(reply.num_tokens for reply in replies)
    return Cost(*(seconds / num_tokens * 1e6 for seconds in used))


def fronts(num_streams: int, quick: bool) -> list[Claim]:
    """A front and its dispatcher, beside one process that does both; two rounds by turns."""
    rounds = [(_cost(num_streams, LONG, quick), _cost(num_streams, LONG, quick, 1)) for _ in range(1 if quick else 2)]
    one = median(alone.router for alone, _ in rounds)
    dispatcher, front = (median(values) for values in zip(*(pair for _, pair in rounds), strict=True))
    figures = {"one process us": one, "dispatcher us": dispatcher, "front us": front}
    title, limit = f"{num_streams} streams behind a front", DISPATCHER_US
    return [
        Claim(f"{title}: dispatcher's CPU a token / {limit:g} us", dispatcher / limit, 1.0, "lower", figures),
        Claim(f"{title}: both / one process", (dispatcher + front) / one, TOGETHER_LIMIT, "lower", figures),
    ]
