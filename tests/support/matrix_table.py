"""The table of a matrix run: python tests/support/matrix_table.py RESULTS. Exit code 1 where a row has not passed."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from matrix_rows import (
    BACKENDS,
    BLOCKS,
    RANKS,
    TOPOLOGIES,
    Row,
    all_rows,
    family_rows,
    latent_rows,
    window_rows,
)

PASSED = ": passed in "
CELL = len(TOPOLOGIES) * len(BLOCKS)
"""Rows of one backend and pair of ranks."""


MODELS = {"windows": window_rows(), "latent": latent_rows(), "families": family_rows()}
"""The columns of rows with models of their own."""


def every_row() -> list[Row]:
    """Of all models."""
    return [row for rows in (all_rows(), *MODELS.values()) for row in rows]


def passed_rows(lines: Iterable[str]) -> set[Row]:
    """Of a results file, which test_matrix.py appends to. Raises ValueError for a line that names no row."""
    rows = {str(row): row for row in every_row()}
    names = [line.partition(PASSED)[0] for line in lines if line.strip()]
    if unknown := [name for name in names if name not in rows]:
        raise ValueError(f"{unknown[0]!r} is no row of the matrix")
    return {rows[name] for name in names}


def table(passed: set[Row]) -> list[str]:
    """A markdown line per backend, a column per pair of ranks and some of other models: how many rows have passed."""
    heads = ["backend", *(f"TP {prefill}, {decode}" for prefill, decode in RANKS), *MODELS]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for backend in BACKENDS:
        counts = [sum((row.backend, row.ranks, row.model) == (backend, each, "") for row in passed) for each in RANKS]
        cells = [f"{count} of {CELL}" for count in counts]
        for rows in MODELS.values():
            own = {row for row in rows if row.backend == backend}
            cells.append(f"{len(own & passed)} of {len(own)}" if own else "-")
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
