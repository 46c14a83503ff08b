"""Run benchmarks and keep their results in benchmarks/results/: python -m benchmarks.run [NAME...] [--vllm VENV]

Leave the machine alone meanwhile. Comparisons with vLLM are skipped unless it is installed (python -m benchmarks.peers
install .bench/vllm). With --quick everything is sent a few requests: that shows that it works, and measures nothing.
Afterwards, python -m benchmarks.results_page writes docs/results.md anew.
"""

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks import (
    behind,
    connectors,
    engine_bound,
    experts,
    fleet,
    front,
    host_gap,
    interference,
    kv_hierarchy,
    linears,
    pd_balance,
    peers,
    policies,
    routers,
    sampler,
    speculation,
    startup,
    step_thread,
    ttft,
    versus,
)
from benchmarks.peers import NEEDED_BY
from benchmarks.report import Claim, Context, Outcome, load_average, save, show
from benchmarks.servers import end_by_signal

WORK = Path(__file__).parent.parent / ".bench"
"""Models and peers that are made once."""

Benchmark = Callable[[Context], list[Claim]]


def _of(module_run: Callable[[Context, str], list[Claim]], size: str) -> Benchmark:
    return lambda context: module_run(context, size)


BENCHMARKS: dict[str, Benchmark] = {
    "startup": startup.run,
    "startup_second": startup.run_second,
    "step_thread": step_thread.run,
    "host_gap": host_gap.run,
    "ttft_tiny": _of(ttft.run, "tiny"),
    "ttft_mid": _of(ttft.run, "mid"),
    "ttft_digests": ttft.run_digests,
    "engine_tiny": _of(versus.run_engine, "tiny"),
    "engine_mid": _of(versus.run_engine, "mid"),
    "engine_moe": _of(versus.run_engine, "moe"),
    "pd_tiny": _of(versus.run_pd, "tiny"),
    "vllm_behind": behind.run,
    "vllm_pair_nixl": _of(behind.run_pair, "nixl"),
    "vllm_pair_store": _of(behind.run_pair, "store"),
    "balance_tiny": _of(pd_balance.run, "tiny"),
    "balance_mid": _of(pd_balance.run, "mid"),
    "front": front.run,
    "fleet": fleet.run,
    "fleet_10000": fleet.run_large,
    "policies": policies.run,
    "routers_prefixes": routers.prefixes,
    "routers_failures": routers.failures,
    "interference_tiny": _of(interference.run, "tiny"),
    "interference_mid": _of(interference.run, "mid"),
    "connector_shared_memory": connectors.run_shared_memory,
    "connector_nixl": connectors.run_nixl,
    "connector_p2p": connectors.run_p2p,
    "kv_hits": kv_hierarchy.run_hits,
    "kv_turns": kv_hierarchy.run_turns,
    "sampler": sampler.run,
    "linears": linears.run,
    "experts": experts.run,
    "engine_bound": engine_bound.run,
    "speculation": speculation.run,
    "speculation_vllm": speculation.run_beside,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all; {', '.join(BENCHMARKS)}")
    parser.add_argument("--models", type=Path, default=WORK / "models", help="where random models are, or are made")
    parser.add_argument("--vllm", type=Path, default=WORK / "vllm", help="virtual environment with vLLM's CPU build")
    parser.add_argument("--routers", type=Path, help="folder with other routers, for `routers_...`; default: not run")
    parser.add_argument("--threads", type=int, help="of torch in this process, for `linears`")
    parser.add_argument("--cpu-time", action="store_true", help="of this thread, for the same: with --threads 1 only")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="smoke run; nothing is written without --out")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if options.cpu_time and options.threads != 1:
        parser.error("--cpu-time is this thread's: it needs --threads 1")
    torch.set_num_threads(options.threads or torch.get_num_threads())
    signal.signal(signal.SIGTERM, end_by_signal)  # so that servers are ended
    names = options.names or list(BENCHMARKS)
    clock = time.thread_time if options.cpu_time else time.perf_counter
    context = Context(options.models, _find_peer(options.vllm, names), options.routers, options.quick, clock)
    failed = False
    for name in names:
        if name in NEEDED_BY and context.vllm is None:
            print(f"{name}: skipped, it needs vLLM: python -m benchmarks.peers install {options.vllm}", flush=True)
            continue
        if name.startswith("routers_") and context.routers is None:
            print(f"{name}: skipped, it needs --routers (benchmarks/routers.py)", flush=True)
            continue
        try:
            outcome = _run(name, context)
        except Exception:  # of a peer, perhaps: the others are measured all the same
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            failed = True
            continue
        print(show(name, outcome.claims), f"({outcome.seconds:.0f} s)", flush=True)
        if options.out is not None:
            save({name: outcome}, options.out)
        elif not options.quick:
            save({name: outcome})
    return int(failed)


def _run(name: str, context: Context) -> Outcome:
    load_before, at, start = load_average(), datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    claims = BENCHMARKS[name](context)
    return Outcome(claims, round(time.perf_counter() - start, 1), load_before, at)


def _find_peer(folder: Path, names: Sequence[str]) -> Path | None:
    if not set(names) & set(NEEDED_BY):
        return None
    try:
        peers.check(folder)
    except FileNotFoundError:
        return None
    return folder


if __name__ == "__main__":
    sys.exit(main())
