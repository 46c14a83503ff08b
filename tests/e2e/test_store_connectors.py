"""Engines that share a KV store: the tokens are transformers', decode computes no prompt token, turns are found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import (
    CHUNKED,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
)

TOPOLOGIES = {"1P1D": ("--prefill", "1", "--decode", "1"), "2P2D": ("--prefill", "2", "--decode", "2")}
BLOCK_SIZES = {
    "16-16": (),
    "16-32": ("--decode-block-size", "32"),
    "32-16": ("--prefill-block-size", "32"),
}


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


def flags(url: str, **options: str) -> tuple[str, ...]:
    """`--connector store` on a URL."""
    pairs = {"url": url, **options}
    return ("--connector", "store", *(x for k, v in pairs.items() for x in ("--connector-config", f"{k}={v}")))


@pytest.mark.parametrize(
    ("topology", "blocks", "load"),
    [
        ("1P1D", "16-16", "async"),
        ("2P2D", "16-32", "async"),
        ("2P2D", "32-16", "layerwise"),
        ("1P1D", "16-16", "layerwise"),
    ],
)
def test_first_pass_and_replay_over_files(
    workload: Workload, tmp_path: Path, topology: str, blocks: str, load: str
) -> None:
    """F8, F9, F10: the replay reads what the first pass has saved."""
    sizes, store = BLOCK_SIZES[blocks], flags(f"file://{tmp_path}/kv", load=load)
    with deployed(workload, *TOPOLOGIES[topology], *sizes, *CHUNKED, *store) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)
