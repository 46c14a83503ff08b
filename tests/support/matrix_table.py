"""The table of a matrix run: python tests/support/matrix_table.py RESULTS. Exit code 1 where a row has not passed."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from matrix_rows import (
    BACKENDS,
    BLOCKS,
    RANKS,
    TOPOLOGIES,
    WINDOW_RANKS,
    Row,
    all_rows,
    family_rows,
    latent_rows,
    window_rows,
)

PASSED = ": passed in "
CELL = len(TOPOLOGIES) * len(BLOCKS)
"""Rows of one backend and pair of ranks."""


def every_row() -> list[Row]:
    """Of all models."""
    return [*all_rows(), *window_rows(), *latent_rows(), *family_rows()]


def passed_rows(lines: Iterable[str]) -> set[Row]:
    """Of a results file, which test_matrix.py appends to. Raises ValueError for a line that names no row."""
    rows = {str(row): row for row in every_row()}
    names = [line.partition(PASSED)[0] for line in lines if line.strip()]
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"{unknown[0]!r} is no row of the matrix")
    return {rows[name] for name in names}


def table(passed: set[Row]) -> list[str]:
    """A markdown line per backend, a column per pair of ranks and one of windows: how many of its rows have passed."""
    lines = [
        "| backend | " + " | ".join(f"TP {prefill}, {decode}" for prefill, decode in RANKS) + " | windows |",
        "|---|" + "---|" * (len(RANKS) + 1),
    ]
    for backend in BACKENDS:
        of_backend = [row for row in passed if row.backend == backend]
        counts = [sum(row.ranks == ranks and not row.model for row in of_backend) for ranks in RANKS]
        cells = [f"{count} of {CELL}" for count in counts]
        cells.append(f"{sum(row.model == 'windows' for row in of_backend)} of {len(WINDOW_RANKS)}")
        lines.append(f"| `{backend}` | " + " | ".join(cells) + " |")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Print the table and what is missing."""
    passed = passed_rows(Path(arguments[0]).read_text().splitlines())
    print("\n".join(table(passed)))
    missing = [row for row in every_row() if row not in passed]
    for row in missing:
        print(f"not passed: {row}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
