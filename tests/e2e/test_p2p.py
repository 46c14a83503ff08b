"""Deployments over p2p, in every order that a push allows: right tokens, none of the prompt computed by decode."""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import (
    CHUNKED,
    SMALL_DECODE_POOL,
    SMALL_PREFILL_POOL,
    Workload,
    check_decode_computed_nothing,
    check_undisturbed,
    deployed,
    greedy_workload,
    run_all,
)

P2P = ("--connector", "p2p")
TOPOLOGIES = {"1P1D": ("--prefill", "1", "--decode", "1"), "2P2D": ("--prefill", "2", "--decode", "2")}


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("topology", "order"),
    [
        ("1P1D", "needs_peer_first"),
        ("2P2D", "concurrent"),
        pytest.param("1P1D", "concurrent", marks=pytest.mark.slow),
        pytest.param("2P2D", "needs_peer_first", marks=pytest.mark.slow),
    ],
)
def test_first_pass_and_replay(workload: Workload, topology: str, order: str) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *P2P, "--order", order, *CHUNKED) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)


@pytest.mark.parametrize("order", ["concurrent", "needs_peer_first"])
def test_small_pools_on_both_sides(workload: Workload, order: str) -> None:
    """Neither pool waits for the other for ever, and preemption on decode takes no KV back to prefill."""
    small = (*SMALL_PREFILL_POOL, *SMALL_DECODE_POOL)
    with deployed(workload, *TOPOLOGIES["1P1D"], *P2P, "--order", order, *small) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            assert books.of("preemptions", "decode") > 0, books


def test_unequal_blocks(workload: Workload) -> None:
    sizes = ("--prefill-block-size", "16", "--decode-block-size", "32")
    with deployed(workload, *TOPOLOGIES["1P1D"], *P2P, *sizes, *CHUNKED) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)


@pytest.mark.parametrize("ranks", [pytest.param(("2", "1"), marks=pytest.mark.slow), ("1", "2")], ids="-".join)
def test_unequal_ranks(workload: Workload, ranks: tuple[str, str]) -> None:
    """F20: decode computes no prompt token, whatever ranks hold the heads."""
    flags = ("--prefill-tp", ranks[0], "--decode-tp", ranks[1], "--order", "concurrent")
    with deployed(workload, *TOPOLOGIES["1P1D"], *P2P, *flags, *CHUNKED) as deployment:
        books = run_all(deployment, workload)
        check_decode_computed_nothing(books)
        check_undisturbed(books)
