"""Whatever the topology, chunking, preemption and cache: the tokens are those of transformers, and decode computes none
of the prompt (F1, F2).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import (
    AGGREGATED,
    CHUNKED,
    NUM_OUTPUT,
    PREEMPTING,
    SMALL_DECODE_POOL,
    TOPOLOGIES,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    run_all,
)
from prompt_set import forty_prompts
from serving_checks import serve_directory

MakeWorkload = Callable[[str], Workload]


@pytest.fixture(scope="module")
def make_workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> MakeWorkload:
    """By family; each is made once."""
    made: dict[str, Workload] = {}

    def make(family: str) -> Workload:
        if family not in made:
            directory = hf_model(family, initializer_range=0.2)  # tokens then depend on the whole prompt
            path = serve_directory(directory, tmp_path_factory.mktemp(family))
            made[family] = Workload(path, forty_prompts(directory, NUM_OUTPUT))
        return made[family]

    return make


@pytest.mark.parametrize("chunks", [(), CHUNKED], ids=["whole", "chunked"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_first_pass_and_replay(make_workload: MakeWorkload, topology: str, chunks: tuple[str, ...]) -> None:
    workload = make_workload("llama")
    with deployed(workload, *TOPOLOGIES[topology], *chunks) as deployment:
        first, replay = (run_all(deployment, workload) for _ in range(2))
    for books in (first, replay):
        check_decode_computed_nothing(books)
        check_undisturbed(books)
    # Each prompt's full blocks are in some cache now.
    assert replay.sources("prefill")["computed"] < first.sources("prefill")["computed"] / 2


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_on_both_sides(make_workload: MakeWorkload, topology: str) -> None:
    workload = make_workload("llama")
    with deployed(workload, *TOPOLOGIES[topology], *PREEMPTING) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            assert books.of("preemptions", "prefill") > 0, books
            assert books.of("preemptions", "decode") > 0, books


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_on_decode_behind_whole_prefills(make_workload: MakeWorkload, topology: str) -> None:
    workload = make_workload("llama")
    with deployed(workload, *TOPOLOGIES[topology], *SMALL_DECODE_POOL) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            assert books.of("preemptions", "decode") > 0, books
            assert books.of("preemptions", "prefill") == books.sources("prefill")["recomputed"] == 0, books


@pytest.mark.parametrize("chunks", [(), CHUNKED], ids=["whole", "chunked"])
def test_aggregated(make_workload: MakeWorkload, chunks: tuple[str, ...]) -> None:
    workload = make_workload("llama")
    with deployed(workload, *AGGREGATED, *chunks) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_undisturbed(books)
            assert books.sources("any")["remote"] == 0


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("flags", [PREEMPTING, ()], ids=["1P1D-preempting", "2P4D"])
def test_every_family(make_workload: MakeWorkload, family: str, flags: tuple[str, ...]) -> None:
    workload = make_workload(family)
    topology = TOPOLOGIES["1P1D" if flags else "2P4D"]
    with deployed(workload, *topology, *flags) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            if flags:
                assert books.of("preemptions", "prefill") > 0, books
                assert books.of("preemptions", "decode") > 0, books
            else:
                check_undisturbed(books)
