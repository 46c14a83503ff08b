"""All that has to be seen on a GPU, in order of value: python -m benchmarks.gpu [smoke | full | PART...]

`smoke` is done in eight minutes: one figure of each kind. Each part is a process of its own, so what breaks one leaves
the others their time. One table and one JSON file are written, after each part anew; the last lines name every case
that failed. Without a GPU nothing runs, but all that parts need is looked for. `--device cpu --scale tiny` runs the
same code without a GPU, on tiny shapes: that shows that it works, and measures nothing.
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

from benchmarks.gpu.dry_run import dry_run
from benchmarks.report import RESULTS, Claim, Outcome, load_average, save, show
from benchmarks.servers import end_by_signal, end_process

PARTS = ("launch", "tokens", "transfer", "kernels", "families", "engine")
"""Modules of this package, each with `run(device, scale)`; the most valuable first."""

SETS = {"smoke": PARTS[:4], "full": PARTS}
BUDGETS_S = {"smoke": 480.0, "full": 1500.0}

_LEAST_S = 20.0
"""A part is not begun with less."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts; returns 0 where all claims of all of them were met, 2 where there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"smoke, full (default), or some of {', '.join(PARTS)}"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--scale", choices=["tiny", "smoke", "full"], help="shapes; tiny: does it run, and is it right?"
    )
    parser.add_argument("--seconds", type=float, help="for all parts together; default: 480 for smoke, else 1500")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)  # of one part, in its own process
    options = parser.parse_args(arguments)
    kind = options.parts[0] if len(options.parts) == 1 and options.parts[0] in SETS else "full"
    parts = SETS[kind] if options.parts in ([], [kind]) else options.parts
    unknown = sorted(set(parts) - set(PARTS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(PARTS)}, or smoke or full alone")
    options.scale = options.scale or kind
    if options.device == "cpu" and options.scale != "tiny":
        parser.error("--device cpu measures nothing: give --scale tiny, too")
    if options.claims is not None:
        return _be_part(options.parts[0], options.device, options.scale, options.claims)
    if options.device == "cuda" and not _has_device():
        return dry_run(parts, options.scale)
    options.seconds = options.seconds or BUDGETS_S[kind]
    return _run_parts(parts, options)


def _run_parts(parts: Sequence[str], options: argparse.Namespace) -> int:
    deadline, failed = time.monotonic() + options.seconds, list[str]()
    for part in parts:
        left_s = deadline - time.monotonic()
        if left_s < _LEAST_S:
            print(f"{part}: not begun, {left_s:.0f} s are left", flush=True)
            failed.append(f"{part}: not begun")
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
                name = f"smoke_{part}" if options.scale == "smoke" else part
                save({name: Outcome(claims, seconds, load, at)}, options.out, prefix=prefix)
        failed += [f"{part}: {problem}"] * bool(problem)
        failed += [f"{show(part, [claim])}" for claim in claims if not claim.met]
    print("\n".join(["failed:", *failed] if failed else ["nothing failed"]))
    return int(bool(failed))


def _run_part(part: str, options: argparse.Namespace, left_s: float, claims: list[Claim]) -> str:
    """Add its claims, those that it wrote before it failed, too. Returns what went wrong."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f".{part}-claims.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", __package__, part, "--device", options.device, "--claims", str(path)]
    command += ["--scale", options.scale]
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


def _be_part(part: str, device: str, scale: str, path: Path) -> int:
    """In the part's own process: run it, and write down each claim as it comes."""
    run: Callable[[str, str], Sequence[Claim]] = importlib.import_module(f"{__package__}.{part}").run
    claims: list[Claim] = []
    for claim in run(device, scale):
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
