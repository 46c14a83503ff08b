"""Where disaggregation begins to pay, in the simulator: aggregated engines beside every xPyD of the same count.

    python -m benchmarks.when_pd_pays [--engines 4] [--requests 150] > docs/when-pd-pays.md

Prints the page. The last part predicts DistServe's 2P1D from the rates of its single phases.
"""

import argparse
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pdkv.bench.datasets import Maker, Shape, load
from pdkv.bench.report import Slo
from pdkv.bench.serve import Pace
from pdkv.simulate.deployment import Topology
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, simulate
from pdkv.simulate.plan import Division, Question, Trials
from pdkv.testing.paced import read_profile

SHAPES = {"short": (256, 200), "even": (1024, 200), "long prompts": (4096, 100)}
"""Tokens of prompts and answers, each within half of it."""

TPOTS, TTFT_S, RATE = (0.010, 0.020), 1.0, 8.0
"""Seconds of the SLOs, and the requests a second from which rates are doubled."""

DISTSERVE: Mapping[str, float] = {"prefill alone": 5.6, "decode alone": 10.0, "colocated": 1.6, "2P1D, a card": 3.3}
"""Requests a second (figure 1 of DistServe, OSDI 2024: OPT-13B, A100, 512 tokens in and 64 out, P90)."""


def make_load(input_len: int, output_len: int, count: int, rate: float, ratio: float = 0.5) -> Load:
    shape = Shape(num_prompts=count, input_len=input_len, output_len=output_len, range_ratio=ratio)
    return Load(load("random", None, shape, Maker(0, as_text=False)), Pace(rate=rate))


def tables(engine: EngineOptions, num_engines: int, count: int) -> Iterator[str]:
    """A row per lengths and SLO: the highest rate of each division."""
    tried = [Division(prefill, num_engines - prefill) for prefill in range(num_engines)]
    yield f"| tokens in/out | TPOT | {' | '.join(d.name for d in tried)} | best PD / aggregated |"
    yield f"|---|---|{'---|' * (num_engines + 1)}"
    for shape, (input_len, output_len) in SHAPES.items():
        for tpot_s in TPOTS:
            asked = Question(make_load(input_len, output_len, count, RATE), num_engines, engine, TTFT_S, tpot_s)
            trials = Trials(asked)
            rates = [trials.highest(division, RATE) for division in tried]
            bounds = [rate > 0 and trials.falls_short(d, rate) for d, rate in zip(tried, rates, strict=True)]
            ratio = "" if bounds[0] else f"{max(rates[1:]) / rates[0]:.2f}" if rates[0] else "only PD"
            shown = " | ".join(f"{'≥ ' * bound}{rate:.3g}" for rate, bound in zip(rates, bounds, strict=True))
            yield f"| {shape}: {input_len}/{output_len} | {1e3 * tpot_s:.0f} ms | {shown} | {ratio} |"


def over_load(engine: EngineOptions, num_engines: int, count: int) -> Iterator[str]:
    """Goodput and tails of each division at rising rates."""
    input_len, output_len = SHAPES["even"]
    slo = Slo({"ttft": 1e3 * TTFT_S, "tpot": 1e3 * TPOTS[1]})
    yield "| requests/s | division | goodput | P99 TTFT ms | P99 TPOT ms | P99 ITL ms |\n|---|---|---|---|---|---|"
    for rate in (4.0 * num_engines, 8.0 * num_engines, 12.0 * num_engines):
        for prefill in range(num_engines):
            division = Division(prefill, num_engines - prefill)
            asked = make_load(input_len, output_len, count, rate)
            _, report = simulate(division.topology(engine), asked, [99], slo)
            figures = " | ".join(f"{report[f'p99_{name}_ms']:.1f}" for name in ("ttft", "tpot", "itl"))
            yield f"| {rate:g} | {division.name} | {report['goodput']:.1f} | {figures} |"


class Phase(NamedTuple):
    """Engines, what is asked of them, and the SLO that counts."""

    topology: Topology
    slo: Mapping[str, float]
    output_len: int

    def keeps(self, rate: float, count: int) -> bool:
        """Whether nine of ten requests are within the SLO."""
        asked = make_load(512, self.output_len, count, rate, 0.0)
        _, report = simulate(self.topology, asked, [90], Slo(self.slo))
        return bool(report["slo_attainment"] >= 0.9)

    def highest_rate(self, count: int) -> float:
        """The highest rate that it keeps."""
        low, high = 0.0, 32.0
        for _ in range(8):
            rate = (low + high) / 2
            low, high = (rate, high) if self.keeps(rate, count) else (low, rate)
        return low


def fitted(wanted: float, phase_of: Callable[[float], Phase], count: int, low: float, high: float) -> float:
    """The most seconds with which a phase keeps the wanted rate."""
    for _ in range(10):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if phase_of(middle).keeps(wanted, count) else (low, middle)
    return low


def distserve(count: int) -> Iterator[str]:
    """Curves from the rates of single phases, and what they predict."""
    ttft, tpot = {"ttft": 400.0}, {"tpot": 40.0}
    base = replace(read_profile(Path("paced:h100")), step_s=0.0145, row_s=0.0, context_token_s=4.6e-7)

    def phase(prefill: int, slo: Mapping[str, float], output_len: int, **curves: float) -> Phase:
        engine = EngineOptions(replace(base, **curves), kv_tokens=60_000, max_num_seqs=128)
        return Phase(Topology(engine, prefill, 1), slo, output_len)

    def prefills(seconds: float) -> Phase:
        return phase(0, ttft, 1, prompt_token_s=seconds)

    def decodes(seconds: float) -> Phase:
        return phase(2, tpot, 64, prompt_token_s=1e-6, row_s=seconds)

    prompt_token_s = fitted(DISTSERVE["prefill alone"], prefills, count, 5e-5, 1e-3)
    row_s = fitted(DISTSERVE["decode alone"], decodes, count, 1e-5, 5e-3)
    curves = {"prompt_token_s": prompt_token_s, "row_s": row_s}
    found = {
        "prefill alone": phase(0, ttft, 1, **curves).highest_rate(count),
        "decode alone": phase(12, tpot, 64, **curves).highest_rate(count),
        "colocated": phase(0, ttft | tpot, 64, **curves).highest_rate(count),
        "2P1D, a card": phase(2, ttft | tpot, 64, **curves).highest_rate(count) / 3,
    }
    yield "| | published | simulated |\n|---|---|---|"
    yield from (f"| {name} | {DISTSERVE[name]:.1f} | {rate:.2f} |" for name, rate in found.items())
    yield f"\nFitted: {1e6 * prompt_token_s:.0f} µs a token of a prompt, {1e3 * row_s:.2f} ms a request that decodes."


HEAD = """\
# When does disaggregation pay?

Generated by `{command}` from the [simulator](simulator.md) with the curves `h100` (derived from data sheets, not
measured; one H100 with a model of 8 billion parameters). Figures are requests per second at which 90 % of the requests
have their first token within {ttft:g} s and each further one within the TPOT of the row, in Poisson arrivals; lengths
are drawn within half of those given. Rates at which the {requests} requests would be over too soon were not tried (≥).

## By lengths and objective
"""
LOAD = """
## Over load

{tokens} tokens in and out, TTFT within {ttft:g} s and TPOT within {tpot:.0f} ms.
"""
CARDS = """
## DistServe's table

One A100 with OPT-13B, 512 tokens in and 64 out, P90 of TTFT 0.4 s and of TPOT 0.04 s. The rates of the single phases
fix the curves; the last two rows are predicted. Its colocated engine runs whole prompts before it decodes, pdkv's runs
them in chunks beside decodes.
"""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--profile", default="h100")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of pools that are full
    engine = EngineOptions(read_profile(Path(f"paced:{args.profile}")), kv_tokens=200_000)
    command = f"python -m benchmarks.when_pd_pays --engines {args.engines} --requests {args.requests}"
    print(HEAD.format(command=command, ttft=TTFT_S, requests=args.requests))
    for line in tables(engine, args.engines, args.requests):
        print(line, flush=True)
    print(LOAD.format(tokens="/".join(map(str, SHAPES["even"])), ttft=TTFT_S, tpot=1e3 * TPOTS[1]))
    for line in over_load(engine, args.engines, args.requests):
        print(line, flush=True)
    print(CARDS)
    for line in distserve(args.requests):
        print(line, flush=True)


if __name__ == "__main__":
    main()
