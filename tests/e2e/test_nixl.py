"""Deployments over nixl, pulling and pushing: right tokens, no prompt token computed by decode, kill -9, no leaks."""

from collections.abc import Callable
from pathlib import Path

import pytest
from deployments import Launch, Running
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
from kills import check_that_no_client_notices, right_answers
from nixl_rig import needs_nixl

pytestmark = needs_nixl

NIXL = ("--connector", "nixl", "--connector-config")
WAYS = {
    "pull": ("mode=pull",),
    "concurrent": ("mode=push", "--order", "concurrent"),
    "needs-peer": ("mode=push", "--order", "needs_peer_first"),
}
TOPOLOGIES = {"1P1D": ("--prefill", "1", "--decode", "1"), "2P2D": ("--prefill", "2", "--decode", "2")}


@pytest.fixture(scope="module")
def workload(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("topology", "way"),
    [
        ("1P1D", "needs-peer"),
        ("2P2D", "pull"),
        ("2P2D", "concurrent"),
        pytest.param("1P1D", "pull", marks=pytest.mark.slow),
        pytest.param("1P1D", "concurrent", marks=pytest.mark.slow),
        pytest.param("2P2D", "needs-peer", marks=pytest.mark.slow),
    ],
)
def test_first_pass_and_replay(workload: Workload, topology: str, way: str) -> None:
    with deployed(workload, *TOPOLOGIES[topology], *NIXL, *WAYS[way], *CHUNKED) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)


@pytest.mark.parametrize("way", ["pull", pytest.param("concurrent", marks=pytest.mark.slow)])
def test_unequal_blocks_and_ranks(workload: Workload, way: str) -> None:
    """F20."""
    shapes = ("--prefill-block-size", "16", "--decode-block-size", "32", "--decode-tp", "2")
    with deployed(workload, *TOPOLOGIES["1P1D"], *NIXL, *WAYS[way], *shapes, *CHUNKED) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            check_undisturbed(books)
        [decode] = [e for e in deployment.get("/topology").json()["engines"] if e["role"] == "decode"]
        assert decode["kv_paths"] == {"nixl": {"prefill-0": "arena"}}


@pytest.mark.parametrize("way", [pytest.param("pull", marks=pytest.mark.slow), "concurrent"])
def test_small_pools_on_both_sides(workload: Workload, way: str) -> None:
    small = (*SMALL_PREFILL_POOL, *SMALL_DECODE_POOL)
    with deployed(workload, *TOPOLOGIES["1P1D"], *NIXL, *WAYS[way], *small) as deployment:
        for _ in range(2):
            books = run_all(deployment, workload)
            check_decode_computed_nothing(books)
            assert books.of("preemptions", "decode") > 0, books


@pytest.fixture(scope="module", params=[pytest.param("pull", marks=pytest.mark.slow), "push"])
def deployment(request: pytest.FixtureRequest, module_launch: Launch) -> Running:
    """Engines that pull are killed in test_faults.py, too."""
    return module_launch("--prefill", "2", "--decode", "2", *NIXL, f"mode={request.param}")


@pytest.fixture(scope="module")
def expected(deployment: Running) -> list[list[int]]:
    return right_answers(deployment)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-1"])
def test_a_killed_engine_takes_no_other_engines_requests_with_it(
    deployment: Running, expected: list[list[int]], victim: str
) -> None:
    """F5."""
    check_that_no_client_notices(deployment, expected, victim)
