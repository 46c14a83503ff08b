"""Eight paced engines on two cores: whether answers are right, steps take what their curve says, and what all costs.

    python -m benchmarks.paced [--runs 3] [--minutes 5] [--connectors shared_memory store]

2 prefill and 6 decode engines of the profile h100; requests of 512 token ids in and 100 out, 20 a second (Poisson).
"""

import argparse
import ast
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.servers import Server, cpu_seconds, metric, pdkv
from benchmarks.support import redis_server
from pdkv.bench.client import Reply
from pdkv.bench.serve import Pace, Target, run_loop, send
from pdkv.bench.workload import one_turn
from pdkv.testing.paced import expected, read_profile

MODEL = Path("paced:h100")
PREFILL, DECODE = 2, 6
INPUT_LEN, OUTPUT_LEN, RATE = 512, 100, 20.0
OPTIONS = ("--threads", "1", "--kv-cache-memory", "128MiB", "--log-level", "info")
_WARM = 20  # requests before those that count
_STEPS = "steps by thousandths of what the curve says: "

Figures = Mapping[str, float]


def _load(server: Server, prompts: Sequence[list[int]], seed: int) -> list[Reply]:
    """Send them at random times, RATE a second on the average."""
    target = Target(server.url, server.model, extra={"return_token_ids": True}, keep_text=True)
    sessions = [one_turn(prompt, OUTPUT_LEN) for prompt in prompts]
    run = run_loop(send(target, sessions, Pace(RATE, seed=seed)))
    return [sent.reply for sent in sorted(run.requests, key=lambda sent: sent.session)]


def measure(connector: Sequence[str], seconds: float, seed: int, redis_cpu: "RedisCpu | None") -> Figures:
    """One run: answers, the part of prompts that decode engines were given, steps, and cores that processes used."""
    rng = random.Random(seed)
    profile = read_profile(MODEL)
    count = max(round(seconds * RATE), 1)
    prompts = [rng.choices(range(profile.vocab_size), k=INPUT_LEN) for _ in range(_WARM + count)]
    with tempfile.TemporaryDirectory(prefix="pdkv-paced-") as folder:
        log = Path(folder, "log")
        with pdkv(MODEL, prefill=PREFILL, decode=DECODE, options=[*OPTIONS, *connector], log=log) as server:
            _load(server, prompts[:_WARM], seed)  # warm
            before, own, began, busy = cpu_seconds(server), time.process_time(), time.monotonic(), _busy_s()
            redis = redis_cpu() if redis_cpu else 0.0
            replies = _load(server, prompts[_WARM:], seed)
            wall_s = time.monotonic() - began
            used = cpu_seconds(server).since(before)
            own = time.process_time() - own
            redis = redis_cpu() - redis if redis_cpu else 0.0
            others = _busy_s() - busy - sum(used.engines.values()) - used.router - own - redis
            handed = [metric(server, "pdkv_engine_prompt_tokens_total", source=name) for name in ("remote", "store")]
        ratios = _steps(log.read_text())
    answers = [
        reply.token_ids == expected(profile, p, OUTPUT_LEN) for reply, p in zip(replies, prompts[_WARM:], strict=True)
    ]
    errors = Counter(reply.error for reply in replies if not reply.ok)
    if errors:
        print(errors, file=sys.stderr)
    decoding = sum(seconds for name, seconds in used.engines.items() if name.startswith("decode"))
    figures = {
        "answers": len(answers), "wrong": answers.count(False), "failed": errors.total(),
        "handed over": sum(handed) / len(prompts) / INPUT_LEN, "steps": ratios.total(),
        "step/curve p50": _percentile(ratios, 0.5), "p99": _percentile(ratios, 0.99),
        "within 5 %": sum(n for r, n in ratios.items() if abs(r - 1000) <= 50) / ratios.total(),
        "within 15 %": sum(n for r, n in ratios.items() if abs(r - 1000) <= 150) / ratios.total(),
        "decode, 100 tokens/s": decoding / (count * OUTPUT_LEN / 100),
        "beside all this": others / wall_s,
        "router": used.router / wall_s, "redis": redis / wall_s, "client": own / wall_s,
    }  # fmt: skip
    return figures | {name: each / wall_s for name, each in sorted(used.engines.items())}


def _busy_s() -> float:
    """Processor seconds that the whole machine has worked, as far as it knows."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # but for idle, and waiting for a disk


def _steps(log: str) -> Counter[int]:
    """Steps of all engines, from the lines at their ends."""
    found: Counter[int] = Counter()
    for line in log.splitlines():
        if _STEPS in line:
            found += Counter(dict(ast.literal_eval(line.partition(_STEPS)[2])))
    return found


def _percentile(permille: Counter[int], share: float) -> float:
    rest = permille.total() * share
    for value, count in sorted(permille.items()):
        rest -= count
        if rest <= 0:
            return value / 1000
    raise ValueError("no step was noted")


class RedisCpu:
    """Processor seconds that a Redis server has used."""

    def __init__(self, url: str) -> None:
        import redis

        self._client = redis.Redis.from_url(url)

    def __call__(self) -> float:
        info = self._client.info("cpu")
        return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 1: an answer was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--connectors", nargs="+", default=["shared_memory", "store"])
    options = parser.parse_args(arguments)
    num_wrong = 0.0
    for connector in options.connectors:
        runs = []
        for seed in range(options.runs):
            if connector == "store":
                with redis_server() as url:
                    flags = ["--connector", "store", "--connector-config", f"url={url}"]
                    runs.append(measure(flags, options.minutes * 60, seed, RedisCpu(url)))
            else:
                runs.append(measure(["--connector", connector], options.minutes * 60, seed, None))
            print(connector, {name: round(value, 4) for name, value in runs[-1].items()}, flush=True)
        num_wrong += sum(run["wrong"] for run in runs)
        print(f"{connector}, median of {len(runs)} (processes: cores)")
        for name in runs[0]:
            print(f"  {name:20} {median(run[name] for run in runs):.4g}")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
