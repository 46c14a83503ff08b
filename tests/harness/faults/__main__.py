"""`python -m faults`: each fault at each place over each backend under load, and what its requests came to."""

import argparse
import sys
import tempfile
from pathlib import Path

from deployments import launches, write_tokenizer
from small_models import make_hf_model
from soak.backends import select

from faults.cells import KINDS, USUAL, cells_of
from faults.report import HEADER, row, save
from faults.run import Outcome, run_cells
from faults.tokens import AT_TOKEN, cut_by_token

KINDS_AND_TOKENS = [*KINDS, AT_TOKEN]


def main() -> int:
    """Run it; the exit status is 1 where a request was lost."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--backends", nargs="*", default=[], help=f"absent: {', '.join(USUAL)}")
    parser.add_argument("--kinds", nargs="*", default=KINDS_AND_TOKENS, choices=KINDS_AND_TOKENS)
    parser.add_argument("--requests", type=int, default=100, help="per cell, at least")
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second; 0: half of the measured capacity")
    parser.add_argument("--stop-s", type=float, default=10.0, help="how long a stopped engine stays so")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/faults-DATE")
    options = parser.parse_args()
    print("\n".join(HEADER), flush=True)
    outcomes: list[Outcome] = []

    def done(outcome: Outcome) -> None:
        print(row(outcome), *outcome.errors[:3], sep="\n  ", flush=True)

    with tempfile.TemporaryDirectory(prefix="faults-model-") as directory:
        model = make_hf_model(Path(directory) / "served", "llama", "float32")
        write_tokenizer(model)
        for backend in select(options.backends) if options.backends else USUAL:
            with launches(model) as launch:
                outcomes += run_cells(
                    launch,
                    cells_of(backend, [kind for kind in options.kinds if kind != AT_TOKEN]),
                    num=options.requests,
                    rate=options.rate or None,
                    stop_s=options.stop_s,
                    done=done,
                )
                if AT_TOKEN in options.kinds:
                    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
                        for outcome in cut_by_token(launch, backend, Path(folder), rounds=-(-options.requests // 16)):
                            done(outcome)
                            outcomes.append(outcome)
    lost = sum(outcome.lost for outcome in outcomes)
    print(f"{sum(outcome.requests for outcome in outcomes)} requests, {lost} lost")
    if options.save:
        print(save(outcomes))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
