"""Autoscaling in the simulator, beside every fixed number of engines that could do the same.

    python -m benchmarks.autoscale [--loads burst swing square] [--start 20] [--seeds 2]

Engines of h100's curves with prompts so slow that one prefill engine saturates at 4.5 requests/s (dynamo#10528).
"""

import argparse
import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pdkv.bench.report import Run, Slo
from pdkv.bench.serve import Pace
from pdkv.bench.workload import FIRST_ID, LAST_ID, Session, one_turn
from pdkv.config import AutoscaleConfig
from pdkv.simulate.deployment import Topology
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, simulate
from pdkv.testing.paced import read_profile

INPUT_LEN, OUTPUT_LEN, SATURATED = 1000, 100, 4.5
SLO = {"ttft": 1000.0, "tpot": 25.0}
BOUNDS = ("prefill=1..4", "decode=1..3")
WINDOW_S, KEPT = 10.0, 0.9
"""Seconds in which so many requests must be within the SLO for the time to count as kept."""


class Shape(NamedTuple):
    """Requests a second over time, their tokens in and out, and what each that decodes adds to a step."""

    seconds: float
    rate: Callable[[float], float]
    lengths: Callable[[float], tuple[int, int]] = lambda at: (INPUT_LEN, OUTPUT_LEN)
    row_s: float = 20e-6


def _between(seconds: float, *points: tuple[float, float]) -> Shape:
    """A rate that goes straight from point to point."""

    def rate(at: float) -> float:
        for (begin, low), (end, high) in itertools.pairwise(points):
            if at < end:
                return low + (high - low) * (at - begin) / (end - begin)
        return points[-1][1]

    return Shape(seconds, rate)


SHAPES = {
    "burst": _between(900, (0, 1), (900, 8)),
    "swing": _between(1500, (0, 1), (300, 1), (420, 10), (780, 10), (900, 1)),
    "square": _between(1500, (0, 1), (300, 1), (301, 10), (780, 10), (781, 1)),
    "ripple": Shape(900, lambda at: 3.7 + 0.8 * math.sin(at / 10)),
    "shift": Shape(
        1200,
        lambda at: 1.5 if 400 <= at < 800 else 3.0,
        lambda at: (100, 800) if 400 <= at < 800 else (1500, 20),
        row_s=1e-3,
    ),
}
"""`ripple` crosses one engine's limit every half minute, `shift` needs two prefill engines, then two decode engines."""


def sessions(shape: Shape, seed: int) -> Iterator[Session]:
    """Requests at random times; each prompt has half to one and a half times its usual tokens."""
    rng, at = random.Random(seed), 0.0
    while (at := at + rng.expovariate(shape.rate(at))) < shape.seconds:
        input_len, output_len = shape.lengths(at)
        length = rng.randint(input_len // 2, input_len * 3 // 2)
        yield one_turn(rng.choices(range(FIRST_ID, LAST_ID), k=length), output_len, at)


def engine_options(shape: Shape) -> EngineOptions:
    profile = read_profile(Path("paced:h100"))
    token_s = (1 / SATURATED - profile.step_s) / INPUT_LEN
    return EngineOptions(replace(profile, prompt_token_s=token_s, row_s=shape.row_s))


def kept_time(run: Run, slo: Slo) -> float:
    """The part of the windows in which enough requests were within the SLO."""
    windows: dict[int, list[bool]] = {}
    for sent in run.requests:
        windows.setdefault(int(sent.due_s / WINDOW_S), []).append(slo.is_met(sent))
    return sum(sum(met) >= KEPT * len(met) for met in windows.values()) / len(windows)


def measure(topology: Topology, shape: Shape, seed: int) -> Mapping[str, Any]:
    """One run: requests that were lost, parts of requests and time within the SLO, engine-seconds, and changes."""
    slo, load = Slo(SLO), [*sessions(shape, seed)]
    run, report = simulate(topology, Load(load, Pace(speed=1.0)), [99], slo)
    scaling = report.get("scaling", {})
    return {
        "requests": len(load), "lost": report["failed"] + report["unsent"],
        "within SLO": report["slo_attainment"], "time kept": kept_time(run, slo),
        "p99 TTFT ms": report["p99_ttft_ms"], "p99 TPOT ms": report["p99_tpot_ms"],
        "engine-seconds": scaling.get("engine_seconds", len(topology.roles) * shape.seconds),
        "flips": scaling.get("counts", {}).get("role", 0), "starts": scaling.get("counts", {}).get("start", 0),
        "stops": scaling.get("counts", {}).get("stop", 0), "decisions": scaling.get("decisions", []),
    }  # fmt: skip


def show(name: str, what: str, found: Mapping[str, Any]) -> None:
    figures = " | ".join(f"{found[key]:.4g}" for key in found if key != "decisions")
    print(f"| {name} | {what} | {figures} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", nargs="+", choices=SHAPES, default=[*SHAPES])
    parser.add_argument("--start", type=float, default=20.0, help="seconds that the start of an engine takes")
    parser.add_argument("--down-after", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--fixed", nargs="*", default=["2P1D", "3P1D", "4P1D"], help="fixed numbers of engines")
    parser.add_argument("--decisions", action="store_true", help="print each")
    args = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    config = AutoscaleConfig(
        autoscale=BOUNDS, slo_ttft_ms=SLO["ttft"], slo_tpot_ms=SLO["tpot"], scale_down_after_s=args.down_after
    )
    is_first = True
    for name in args.loads:
        engine = engine_options(SHAPES[name])
        for seed in range(args.seeds):
            found = measure(Topology(engine, 1, 1, autoscale=config, start_s=args.start), SHAPES[name], seed)
            if is_first:
                titles = [key for key in found if key != "decisions"]
                print(f"| load | engines | {' | '.join(titles)} |\n|---|---|{'---|' * len(titles)}")
                is_first = False
            show(name, "autoscaled", found)
            for each in reversed(found["decisions"]) if args.decisions else ():
                print(f"  {each}")
            for fixed in args.fixed:
                prefill, decode = map(int, fixed.removesuffix("D").split("P"))
                show(name, fixed, measure(Topology(engine, prefill, decode), SHAPES[name], seed))


if __name__ == "__main__":
    main()
