"""Measure the claims; `make bench`. Each figure is a ratio within one run on this machine.

    python -m benchmarks.run [CLAIM ...] [--model tiny mid] [--vllm VENV] [--seconds 60] [--out benchmarks/results]

Without --vllm (python -m benchmarks.peers install VENV) the claims beside vLLM are left out.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import peers
from benchmarks.claims import against_vllm, balance, first_token, interference, many, startup
from benchmarks.claims.rows import Row, markdown, write
from benchmarks.models import make_model

CLAIMS = ("startup", "first_token", "many", "balance", "interference", "aggregated", "disaggregated")
NEEDS_VLLM = ("aggregated", "disaggregated")


def measure(claim: str, model: str, path: Path, options: argparse.Namespace) -> list[Row]:
    """The rows of one claim for one model."""
    by_name: dict[str, Callable[[], list[Row]]] = {
        "first_token": lambda: first_token.run(model, path),
        "many": lambda: many.run(model, path),
        "balance": lambda: balance.run(model, path),
        "interference": lambda: interference.run(model, path, options.seconds),
        "aggregated": lambda: against_vllm.aggregated(model, path, options.vllm),
        "disaggregated": lambda: against_vllm.disaggregated(model, path, options.vllm),
    }
    return by_name[claim]()


def wanted(claim: str, model: str) -> bool:
    """Whether a claim is about this model."""
    return not (model == "mid" and claim in ("many", "disaggregated"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"of {', '.join(CLAIMS)} (default: all)")
    parser.add_argument("--model", nargs="+", choices=["tiny", "mid"], default=["tiny", "mid"])
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run of `interference`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args(arguments)
    unknown = [claim for claim in options.claims if claim not in CLAIMS]
    if unknown:
        parser.error(f"unknown claim {unknown[0]!r}; known: {', '.join(CLAIMS)}")
    if options.vllm is not None:
        peers.check(options.vllm)
    claims = [c for c in options.claims or CLAIMS if options.vllm is not None or c not in NEEDS_VLLM]
    with tempfile.TemporaryDirectory(prefix="pdkv-bench-models-") as folder:
        for claim in claims:
            rows = startup.run() if claim == "startup" else []
            for model in [m for m in options.model if claim != "startup" and wanted(claim, m)]:
                rows += measure(claim, model, make_model(model, Path(folder)), options)
            print(f"\n{markdown(rows)}", flush=True)
            write(options.out, claim, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
