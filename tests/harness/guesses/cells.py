"""The deployments: every two values of two columns meet in one of them."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

METHODS = ("ngram", "suffix", "prediction", "draft_model")
BACKENDS = ("shared_memory", "p2p", "nixl pull", "nixl push", "store tiers", "multi")
TOPOLOGIES = ("0P2D", "1P1D", "2P2D")
RANKS = (1, 2)
MISHAPS = ("none", "preemption", "chunks", "migration", "kill")
CHOOSING = (False, True)
"""Whether the engine chooses how many guesses are verified; else all are."""

COLUMNS: Sequence[Sequence[Any]] = (METHODS, BACKENDS, TOPOLOGIES, RANKS, MISHAPS, CHOOSING)
SMALL_POOL = ("--kv-cache-memory", "{small}", "--max-model-len", "512", "--max-leased-fraction", "4")
CHUNKS = ("--max-num-batched-tokens", "48", "--max-num-seqs", "40", "--long-prefill-token-threshold", "24")


class Cell(NamedTuple):
    """One deployment."""

    method: str
    backend: str
    topology: str
    ranks: int
    mishap: str
    adaptive: bool

    def __str__(self) -> str:
        how = "chosen" if self.adaptive else "all"
        return f"{self.method} ({how}), {self.topology} over {self.backend}, TP {self.ranks}, {self.mishap}"

    @property
    def is_possible(self) -> bool:
        """Whether there is another engine to go on, where work is moved on purpose."""
        return self.mishap != "migration" or self.topology != "1P1D"

    def flags(self, drafter: Path, block_bytes: int) -> list[str]:
        """Of `pd launch`, but for the backend's."""
        config: dict[str, Any] = {"method": self.method, "num_speculative_tokens": 4, "adaptive": self.adaptive}
        config |= {"ngram": {"prompt_lookup_min": 1}, "draft_model": {"model": str(drafter)}}.get(self.method, {})
        if self.method == "draft_model":
            config["draft_kv_cache_memory"] = "16MiB"
        prefill, decode = self.topology[0], self.topology[2]
        flags = ["--prefill", prefill, "--decode", decode, "--tp", str(self.ranks)]
        flags += ["--speculative-config", json.dumps(config)]
        if self.mishap == "preemption":
            return flags + [flag.format(small=40 * block_bytes) for flag in SMALL_POOL]
        return [*flags, "--kv-cache-memory", str(1600 * block_bytes), *(CHUNKS if self.mishap == "chunks" else ())]


def cover() -> list[Cell]:
    """Cells in which every two possible values of two columns meet, chosen greedily."""
    cells = [cell for cell in itertools.starmap(Cell, itertools.product(*COLUMNS)) if cell.is_possible]
    missing = {pair for cell in cells for pair in pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(missing & pairs(cell)))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def pairs(cell: Cell) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    """Every two values of a cell, each with its column's number."""
    return set(itertools.combinations(enumerate(cell), 2))
