"""How often `pd plan` recommends what is measured to be best, on ten traces that it was not built with.

    python -m benchmarks.plan_traces [--traces NAME...] [--seconds 180] [--stretch 20] [--real] [--profile FILE]

The plan sees a trace at its own rate; every division is then sent the same trace at the highest rate that the plan
names, in the simulator. With --real the recommended division, its runner-up, and the engines aggregated are, on paced
engines in processes of their own, side by side. Printed are the shares of requests within the SLO, and whether the
recommended one's is the highest or within 5 % of it. --stretch 20 has all take 20 times as long, so that what this
machine takes beside the engines' steps counts less.
"""

import argparse
import logging
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.servers import pdkv
from pdkv.base.trace_format import BLOCK_SIZE, VERSION, Head, TraceRequest
from pdkv.bench.datasets import Maker, Shape, load
from pdkv.bench.report import summarize
from pdkv.bench.serve import Pace, Target, run_loop, send
from pdkv.config import PACED
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, simulate
from pdkv.simulate.plan import Division, Question, plan
from pdkv.testing.paced import Profile, read_profile

CURVE = ("step_s", "row_s", "prompt_token_s", "context_token_s")
KV_TOKENS = 68_256
"""That a pool holds: 400 MiB of the profile h100."""


class Kind(NamedTuple):
    """A kind of traffic: sessions of turns, in bursts. Lengths are drawn within half of those given."""

    rate: float  # sessions a second
    input_len: int  # of a turn
    output_len: int
    tpot_ms: float
    ttft_s: float = 1.0
    turns: int = 1
    pause_s: float = 0.0
    shared: int = 0  # tokens with which all sessions of a family begin
    burst: int = 1  # sessions that come together
    short: float = 0.0  # share of sessions with a 64th of the prompt

    def stretched(self, times: float) -> "Kind":
        """The same traffic, `times` times as slow."""
        return self._replace(
            rate=self.rate / times, tpot_ms=self.tpot_ms * times, ttft_s=self.ttft_s * times,
            pause_s=self.pause_s * times,
        )  # fmt: skip


KINDS: Mapping[str, Kind] = {
    "chat": Kind(20, 256, 200, 20.0),
    "labels": Kind(40, 1024, 4, 50.0, ttft_s=0.3),
    "drafts": Kind(8, 1024, 300, 50.0, ttft_s=2.0),
    "summaries": Kind(6, 3072, 100, 10.0),
    "documents": Kind(3, 6000, 150, 10.0, ttft_s=2.0),
    "code": Kind(10, 1500, 200, 10.0, shared=1024),
    "bursts": Kind(8, 1024, 100, 12.0, burst=6),
    "pings": Kind(16, 2048, 100, 10.0, ttft_s=0.3, short=0.7),
    "mail": Kind(8, 4096, 60, 10.0, ttft_s=0.5, short=0.5),
    "agents": Kind(2, 200, 40, 10.0, ttft_s=0.3, turns=8, pause_s=0.5, shared=2048),
}
"""The traces, by name."""


def slower(profile: Profile, times: float) -> Profile:
    """The same engines, so many times as slow."""
    return replace(profile, **{name: getattr(profile, name) * times for name in CURVE})


def as_file(profile: Profile, folder: str) -> Path:
    """A profile as a model's path."""
    path = Path(folder, "engine.toml")
    path.write_text("".join(f"{name} = {value}\n" for name, value in vars(profile).items()))
    return Path(f"{PACED}{path}")


def trace(kind: Kind, seconds: float, seed: int) -> Iterator[TraceRequest]:
    """Requests as a router records them; later turns have the prompts before them."""
    rng, now, session = random.Random(seed), 0.0, 0

    def around(length: int) -> int:
        return max(round(length * rng.uniform(0.5, 1.5)), 1)

    def blocks(count: int, family: int | None = None) -> list[str]:
        source = rng if family is None else random.Random(family)
        return [f"{source.getrandbits(64):016x}" for _ in range(count)]

    while (now := now + rng.expovariate(kind.rate / kind.burst)) < seconds:
        for _ in range(kind.burst):
            session, at, size = session + 1, now, kind.shared
            known = blocks(kind.shared // BLOCK_SIZE, rng.randrange(8))
            scale = 64 if rng.random() < kind.short else 1
            for _ in range(kind.turns):
                size += around(kind.input_len // scale)
                known = known + blocks(size // BLOCK_SIZE - len(known))
                num_out = around(kind.output_len)
                e2e_s = 0.3 + 0.01 * num_out
                yield TraceRequest(
                    t=at, session=session, key=0, prompt_tokens=size, output_tokens=num_out, max_tokens=num_out,
                    blocks=tuple(known), outcome="length", ttft_s=0.3, e2e_s=e2e_s,
                )  # fmt: skip
                at, size = at + e2e_s + kind.pause_s * rng.uniform(0.5, 1.5), size + num_out


class Trial(NamedTuple):
    """A kind of traffic, and what it is served with."""

    kind: Kind
    engine: EngineOptions
    num_engines: int

    def load(self, seconds: float, seed: int = 1) -> Load:
        """A trace, read from its recording."""
        head = Head(pdkv_trace=VERSION, block_size=BLOCK_SIZE, model="drawn")
        lines = [head, *sorted(trace(self.kind, seconds, seed), key=lambda request: request.t)]
        with tempfile.TemporaryDirectory(prefix="pdkv-trace-") as folder:
            path = Path(folder, "trace.jsonl")
            path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            return Load(load("trace", path, Shape(num_prompts=1 << 20), Maker(0, as_text=False)), Pace(speed=1.0))

    def question(self, asked: Load) -> Question:
        """What the plan is asked."""
        return Question(asked, self.num_engines, self.engine, self.kind.ttft_s, self.kind.tpot_ms / 1e3)

    def simulated(self, division: Division, asked: Load) -> float:
        """The share of requests within the SLO."""
        _, report = simulate(division.topology(self.engine), asked, [99], self.question(asked).slo)
        return float(report["slo_attainment"])

    def measured(self, divisions: Sequence[Division], asked: Load) -> Mapping[Division, float]:
        """The shares of requests within the SLO on paced engines."""
        with tempfile.TemporaryDirectory(prefix="pdkv-plan-") as folder:
            model = as_file(self.engine.profile, folder)

            def measure(division: Division) -> float:
                options = ["--threads", "1", "--kv-cache-memory", "400MiB", "--local-turns", "auto"]
                options += ["--order", "decode_first"] if division.conditional else []
                engines = {"prefill": division.prefill, "decode": division.decode}
                with pdkv(model, **engines, options=options) as server:
                    run = run_loop(send(Target(server.url, server.model), asked.sessions, asked.pace))
                return float(summarize(run, [99], self.question(asked).slo)["slo_attainment"])

            with ThreadPoolExecutor(len(divisions)) as pool:
                return dict(zip(divisions, pool.map(measure, divisions), strict=True))


def judge(name: str, trial: Trial, seconds: float, *, real: bool) -> bool:
    """Whether the recommended division is within 5 % of the best; prints a row."""
    load = trial.load(seconds)
    answer = plan(trial.question(load))
    again = load.at_rate(answer.best.rate or answer.outcomes[0].rate or 1.0)
    tried = [outcome.division for outcome in answer.outcomes]
    if real:
        tried = [d for d in tried if d in (tried[0], tried[1]) or not d.prefill]
    found = trial.measured(tried, again) if real else {d: trial.simulated(d, again) for d in tried}
    most, own = max(found.values()), found[answer.best.division]
    shown = ", ".join(f"{division.name} {share:.1%}" for division, share in sorted(found.items(), key=lambda f: -f[1]))
    met = own * 1.05 >= most
    print(
        f"| {name} | {len(load.sessions)} | {again.rate:.3g} | {answer.best.division.name} | {shown} | "
        f"{'yes' if met else 'NO'} |", flush=True
    )  # fmt: skip
    return met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", nargs="+", choices=KINDS, default=list(KINDS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=180.0, help="of each trace (default: %(default)g)")
    parser.add_argument("--engines", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument(
        "--profile", default="h100", help="the engines' curves, as for `pd plan` (default: %(default)s)"
    )
    parser.add_argument("--stretch", type=float, default=1.0, metavar="TIMES", help="(default: %(default)g)")
    parser.add_argument("--real", action="store_true", help="measure paced engines of the profile h100")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # of pools that are full
    profile = slower(read_profile(Path(f"{PACED}{args.profile}")), args.stretch)
    engine = EngineOptions(profile, kv_tokens=KV_TOKENS)
    print("| trace | sessions | sessions/s | recommended | within the SLO there | best or within 5 % |")
    print(f"|{'---|' * 6}")
    trials = {name: Trial(KINDS[name].stretched(args.stretch), engine, args.engines) for name in args.traces}
    met = [judge(name, trial, args.seconds, real=args.real) for name, trial in trials.items()]
    print(f"\n{sum(met)} of {len(met)}")


if __name__ == "__main__":
    main()
