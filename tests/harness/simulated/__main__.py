"""The simulator beside the deployments that it stands for: paced engines in processes of their own, the same load.

    python -m simulated [--cases NAME...] [--save]

Engines are those of the profile h100, ten times as slow (steps of 70 to 90 ms), so that what two cores take beside the
steps counts less; what it is, is known from `pd profile`. All deployments run side by side.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Barrier
from typing import Any, NamedTuple

from benchmarks.plan_traces import as_file, slower
from benchmarks.report import Claim, Outcome, load_average, save, show
from benchmarks.servers import START_TIMEOUT_S, pdkv
from pdkv.bench.datasets import Maker, Shape, load
from pdkv.bench.report import Slo, summarize
from pdkv.bench.serve import Pace, Target, run_loop, send
from pdkv.bench.workload import LAST_ID, one_turn
from pdkv.config import PACED
from pdkv.simulate.deployment import Topology
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, simulate
from pdkv.testing.paced import Profile, read_profile

TIMES = 10.0
OWN = {"request_s": 0.0037, "prompt_s": 0.0017, "transfer_s": 0.0046}
"""What two quiet cores take beside the steps (docs/simulator.md)."""

LENGTH = 4096
PERCENTS = {50: 0.05, 99: 0.1}
"""Largest relative errors that the goals allow, by percentile."""

RANDOM = Shape(num_prompts=70, input_len=512, output_len=40, range_ratio=0.5)
TALKS = Shape(num_prompts=96, input_len=256, output_len=32, turns=4)
PAUSES = Shape(num_prompts=96, input_len=256, output_len=32, turns=4, pause_s=10)
AGENTS = Shape(num_prompts=48, input_len=256, output_len=16, turns=6, max_context=2048)


class Case(NamedTuple):
    """A deployment, and what it is sent: sessions a second of engines that are not slow."""

    prefill: int
    decode: int
    data: str
    shape: Shape
    rate: float
    kv_tokens: int = 65_536
    host_tokens: int = 0
    push: bool = False

    def options(self, token_bytes: int) -> Sequence[str]:
        """The launch's options."""
        options = ["--threads", "1", "--local-turns", "auto", "--max-model-len", str(LENGTH)]
        options += ["--kv-cache-memory", str(self.kv_tokens * token_bytes)]
        options += ["--connector", "p2p"] if self.push else []
        return options + (["--kv-host-memory", str(self.host_tokens * token_bytes)] if self.host_tokens else [])


CASES: Mapping[str, Case] = {
    "1 aggregated": Case(0, 1, "random", RANDOM, 6),
    "1P1D": Case(1, 1, "random", RANDOM, 7),
    "2P2D": Case(2, 2, "random", RANDOM, 12),
    "3P5D": Case(3, 5, "random", RANDOM, 20),
    "2P2D, pushes": Case(2, 2, "random", RANDOM, 12, push=True),
    "2P2D, conversations": Case(2, 2, "conversations", TALKS, 6),
    "2P2D, agents": Case(2, 2, "agents", AGENTS, 3),
    "2P2D, conversations, host memory": Case(2, 2, "conversations", PAUSES, 8, 4096, 65_536),
}


def compare(cases: Mapping[str, Case]) -> Iterator[Claim]:
    """Every case, measured and simulated."""
    profile = replace(slower(read_profile(Path(f"{PACED}h100")), TIMES), max_model_len=LENGTH)
    ready = Barrier(len(cases))
    with tempfile.TemporaryDirectory(prefix="pdkv-simulated-") as folder, ThreadPoolExecutor(len(cases)) as pool:
        model = as_file(profile, folder)
        measured = [*pool.map(lambda case: _measured(case, profile, model, ready), cases.values())]
    for (name, case), found in zip(cases.items(), measured, strict=True):
        yield from _claims(name, found, _simulated(case, profile))


def _load(case: Case) -> Load:
    return Load(load(case.data, None, case.shape, Maker(1, as_text=False)), Pace(rate=case.rate / TIMES, seed=1))


def _measured(case: Case, profile: Profile, model: Path, ready: Barrier) -> Mapping[str, Any]:
    asked, options = _load(case), case.options(EngineOptions(profile).layout.token_bytes)
    with pdkv(model, prefill=case.prefill, decode=case.decode, options=options) as server:
        target = Target(server.url, server.model, extra={"return_token_ids": True}, keep_text=True)
        warm = [one_turn([LAST_ID - i] * 32, 4) for i in range(2 * (case.prefill + case.decode))]
        run_loop(send(target, warm, Pace()))
        ready.wait(START_TIMEOUT_S)
        return summarize(run_loop(send(target, asked.sessions, asked.pace)), list(PERCENTS), Slo({}))


def _simulated(case: Case, profile: Profile) -> Mapping[str, Any]:
    engine = EngineOptions(
        replace(profile, **OWN), case.kv_tokens, host_tokens=case.host_tokens, push=case.push
    )  # fmt: skip
    return simulate(Topology(engine, case.prefill, case.decode), _load(case), list(PERCENTS), Slo({}))[1]


def _claims(name: str, measured: Mapping[str, Any], simulated: Mapping[str, Any]) -> Iterator[Claim]:
    """How far off each figure is, as a share of what was measured."""
    keys = {f"p{percent}_{kind}_ms": most for kind in ("ttft", "tpot") for percent, most in PERCENTS.items()}
    for key, most in (keys | {"cached_input_tokens": PERCENTS[50]}).items():
        both = {"measured": float(measured[key]), "simulated": float(simulated[key])}
        if both["measured"] or both["simulated"]:
            off = abs(both["simulated"] - both["measured"]) / max(both["measured"], 1e-9)
            yield Claim(f"{name}: {key}, off by", off, most, "lower", both)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results/")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of pools that are full
    load_before, began = load_average(), time.monotonic()
    claims = [*compare({name: CASES[name] for name in args.cases})]
    print(show("simulated", claims))
    if args.save:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        save({"simulated": Outcome(claims, time.monotonic() - began, load_before, at)})


if __name__ == "__main__":
    main()
