"""Engines over `multi`: shared memory hands prompts over, a store keeps them beyond their engines' lives."""

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

TOPOLOGIES = {
    "1P1D": ("--prefill", "1", "--decode", "1"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "TP1-TP2": ("--prefill", "1", "--decode", "1", "--decode-tp", "2"),
}


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


def multi(*names: str, **options: str) -> list[str]:
    """Flags for a multi of these connectors."""
    pairs = [
        f"connectors={','.join(names)}",
        *(f"{name.replace('__', '.')}={value}" for name, value in options.items()),
    ]
    return ["--connector", "multi", "--connector-config", *pairs]


@pytest.mark.parametrize("topology", [pytest.param("1P1D", marks=pytest.mark.slow), "2P2D", "TP1-TP2"])
def test_tokens_over_shared_memory_and_a_store(workload: Workload, tmp_path: Path, topology: str) -> None:
    """Two passes, then other engines: what they find is the store's, and it is right."""
    flags = multi("shared_memory", "shared_storage", shared_storage__path=f"{tmp_path}/kv")
    found = 0
    for _ in range(2):
        with deployed(workload, *TOPOLOGIES[topology], *CHUNKED, *flags) as deployment:
            passes = [run_all(deployment, workload) for _ in range(2)]
        for books in passes:
            check_decode_computed_nothing(books)
            check_undisturbed(books)
        before, found = found, passes[0].sources("prefill")["store"]
    assert found > before


@pytest.mark.parametrize("other", ["shared_storage", "shared_memory"])
def test_tokens_over_a_push_and_what_finds_content(workload: Workload, tmp_path: Path, other: str) -> None:
    """Hand-offs go by the push; what was computed before is found by the other one."""
    own = {"shared_storage__path": f"{tmp_path}/kv"} if other == "shared_storage" else {}
    flags = ["--prefill", "2", "--decode", "2", *CHUNKED, *multi("p2p", other, **own)]
    with deployed(workload, *flags) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)
