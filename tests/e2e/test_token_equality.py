"""Whatever the model's family, topology, chunking, preemption and cache: the tokens are those of transformers, and none
of the prompt is computed by decode (F1, F2). Other files do the same with other connectors and models.
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
    run_twice,
    run_until_preempted,
)
from small_models import FEATURES, NEWER

SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", *(pytest.param(name, marks=SLOW) for name in (*FEATURES, *NEWER))])
def workload(
    request: pytest.FixtureRequest, hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Workload:
    model = hf_model(request.param, initializer_range=0.2, **FEATURES.get(request.param, {}))
    return greedy_workload(model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("topology", "chunks"),
    [
        pytest.param("1P1D", CHUNKED, id="1P1D-chunked"),
        pytest.param("1P1D", (), id="1P1D-whole", marks=SLOW),
        pytest.param("2P4D", CHUNKED, id="2P4D-chunked", marks=SLOW),
        pytest.param("2P4D", (), id="2P4D-whole", marks=SLOW),
    ],
)
def test_first_pass_and_replay(workload: Workload, topology: str, chunks: tuple[str, ...]) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *chunks) as deployment:
        first, replay = run_twice(deployment, workload)
    # Each prompt's full blocks are in some cache now.
    assert replay.sources("prefill")["computed"] < first.sources("prefill")["computed"] / 2


@pytest.mark.parametrize("topology", ["1P1D", pytest.param("2P1D", marks=SLOW)])
def test_preemption_on_both_sides(workload: Workload, topology: str) -> None:
    """F9, F12."""
    with deployed(workload, *TOPOLOGIES[topology], *PREEMPTING) as deployment:
        run_until_preempted(deployment, workload)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1P1D", "2P4D"])
def test_preemption_on_decode_behind_whole_prefills(workload: Workload, topology: str) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *SMALL_DECODE_POOL) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            assert books.of("preemptions", "decode") > 0, books
            assert books.of("preemptions", "prefill") == books.sources("prefill")["recomputed"] == 0, books


@pytest.mark.slow
def test_aggregated(workload: Workload) -> None:
    with deployed(workload, *AGGREGATED, *CHUNKED) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_undisturbed(books)
            assert books.sources("any")["remote"] == 0
