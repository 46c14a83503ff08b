"""All that has to be seen on a GPU, within minutes, in order of value: python -m benchmarks.gpu [PART...]

Each part is a process of its own, so what breaks one leaves the others their time. One table and one JSON file are
written, after each part anew. `--device cpu --smoke` runs the same code without a GPU, on tiny shapes: that shows that
it works, and measures nothing.
"""

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.report import RESULTS, Claim, Outcome, load_average, save, show
from benchmarks.servers import end_by_signal, end_process

PARTS = ("smoke", "tokens", "transfer", "kernels", "engine")
"""Modules of this package, each with `run(device, smoke)`; the most valuable first."""

BUDGET_S = 480.0

_LEAST_S = 20.0
"""A part is not begun with less."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts; returns 0 where all claims of all of them were met, 2 where there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes: does it run, and is it right?")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for all parts together")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)  # of one part, in its own process
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.device == "cpu" and not options.smoke:
        parser.error("--device cpu measures nothing: give --smoke, too")
    if options.claims is not None:
        return _be_part(options.parts[0], options.device, options.smoke, options.claims)
    if options.device == "cuda" and not _has_device():
        print("no CUDA device; --device cpu --smoke shows whether the parts run", file=sys.stderr)
        return 2
    return _run_parts(options.parts or PARTS, options)


def _run_parts(parts: Sequence[str], options: argparse.Namespace) -> int:
    deadline, all_met = time.monotonic() + options.seconds, True
    for part in parts:
        left_s = deadline - time.monotonic()
        if left_s < _LEAST_S:
            print(f"{part}: not begun, {left_s:.0f} s are left", flush=True)
            all_met = False
            continue
        at, load, began = datetime.now(UTC).isoformat(timespec="seconds"), load_average(), time.monotonic()
        claims: list[Claim] = []
        problem = "FAILED: ended from outside"
        try:
            problem = _run_part(part, options, left_s, claims)
        finally:
            seconds = round(time.monotonic() - began, 1)
            print(show(part, claims) or f"{part}:", problem, f"({seconds:.0f} s)", flush=True)
            if claims:
                prefix = "gpu-" if options.device == "cuda" else "gpu-on-cpu-"
                save({part: Outcome(claims, seconds, load, at)}, options.out, prefix=prefix)
        all_met = all_met and not problem and all(claim.met for claim in claims)
    return int(not all_met)


def _run_part(part: str, options: argparse.Namespace, left_s: float, claims: list[Claim]) -> str:
    """Add its claims, those that it wrote before it failed, too. Returns what went wrong."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f".{part}-claims.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", __package__, part, "--device", options.device, "--claims", str(path)]
    command += ["--smoke"] if options.smoke else []
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if options.device == "cpu" else {})
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = process.wait(left_s)
        problem = f"FAILED with exit status {code}" if code else ""
    except subprocess.TimeoutExpired:
        problem = f"FAILED: not done in {left_s:.0f} s"
    finally:
        end_process(process)  # and the servers that it has started
        if path.exists():
            claims += msgspec.json.decode(path.read_bytes(), type=list[Claim])
            path.unlink()
    return problem or ("" if claims else "FAILED: no claim")


def _be_part(part: str, device: str, smoke: bool, path: Path) -> int:
    """In the part's own process: run it, and write down each claim as it comes."""
    run: Callable[[str, bool], Sequence[Claim]] = importlib.import_module(f"{__package__}.{part}").run
    claims: list[Claim] = []
    for claim in run(device, smoke):
        claims.append(claim)
        written = path.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(claims))
        written.replace(path)  # whoever ends this process finds whole claims
    return 0


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end_by_signal)
    sys.exit(main())
