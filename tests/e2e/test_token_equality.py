"""Whatever the topology, chunking, preemption and cache: the tokens are those of transformers, and decode computes none
of the prompt (F1, F2).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import (
    AGGREGATED,
    CHUNKED,
    PREEMPTING,
    SMALL_DECODE_POOL,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
    run_until_preempted,
)


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("topology", "chunks"),
    [
        pytest.param("1P1D", (), id="1P1D-whole"),
        pytest.param("2P4D", CHUNKED, id="2P4D-chunked"),
        pytest.param("1P1D", CHUNKED, id="1P1D-chunked", marks=pytest.mark.slow),
        pytest.param("2P4D", (), id="2P4D-whole", marks=pytest.mark.slow),
    ],
)
def test_first_pass_and_replay(workload: Workload, topology: str, chunks: tuple[str, ...]) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *chunks) as deployment:
        first, replay = (run_all(deployment, workload) for _ in range(2))
    for books in (first, replay):
        check_decode_computed_nothing(books)
        check_undisturbed(books)
    # Each prompt's full blocks are in some cache now.
    assert replay.sources("prefill")["computed"] < first.sources("prefill")["computed"] / 2


@pytest.mark.parametrize("topology", [pytest.param("1P1D", marks=pytest.mark.slow), "2P1D"])
def test_preemption_on_both_sides(workload: Workload, topology: str) -> None:
    """F9, F12."""
    with deployed(workload, *TOPOLOGIES[topology], *PREEMPTING) as deployment:
        run_until_preempted(deployment, workload)


@pytest.mark.parametrize("topology", ["1P1D", pytest.param("2P4D", marks=pytest.mark.slow)])
def test_preemption_on_decode_behind_whole_prefills(workload: Workload, topology: str) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *SMALL_DECODE_POOL) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            assert books.of("preemptions", "decode") > 0, books
            assert books.of("preemptions", "prefill") == books.sources("prefill")["recomputed"] == 0, books


def test_aggregated(workload: Workload) -> None:
    with deployed(workload, *AGGREGATED, *CHUNKED) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_undisturbed(books)
            assert books.sources("any")["remote"] == 0
