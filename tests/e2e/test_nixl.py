"""Deployments over nixl, pulling and pushing: right tokens, no prompt token computed by decode, kill -9, no leaks."""

from collections.abc import Iterator

import pytest
from deployments import Running
from equality import (
    CHUNKED,
    SMALL_DECODE_POOL,
    SMALL_PREFILL_POOL,
    TOPOLOGIES,
    Workload,
    deployed,
    run_twice,
    run_until_preempted,
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


@pytest.fixture(scope="module")
def pushing(workload: Workload) -> Iterator[Running]:
    """Engines that are killed in the end; those that pull are killed in test_faults.py."""
    with deployed(workload, *TOPOLOGIES["2P2D"], *NIXL, *WAYS["concurrent"], *CHUNKED) as deployment:
        yield deployment


def test_first_pass_and_replay_by_a_push(workload: Workload, pushing: Running) -> None:
    run_twice(pushing, workload)


@pytest.mark.slow
def test_first_pass_and_replay_by_a_push_of_a_prompt_whose_decode_has_room(workload: Workload) -> None:
    with deployed(workload, *TOPOLOGIES["2P2D"], *NIXL, *WAYS["needs-peer"], *CHUNKED) as deployment:
        run_twice(deployment, workload)


def test_unequal_blocks_and_ranks(workload: Workload) -> None:
    """F20."""
    shapes = ("--prefill-block-size", "16", "--decode-block-size", "32", "--decode-tp", "2")
    with deployed(workload, *TOPOLOGIES["1P1D"], *NIXL, *WAYS["pull"], *shapes, *CHUNKED) as deployment:
        run_twice(deployment, workload)
        [decode] = [e for e in deployment.get("/topology").json()["engines"] if e["role"] == "decode"]
        assert decode["kv_paths"] == {"nixl": {"prefill-0": "arena"}}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_small_pools_on_both_sides(workload: Workload, way: str) -> None:
    small = (*SMALL_PREFILL_POOL, *SMALL_DECODE_POOL)
    with deployed(workload, *TOPOLOGIES["1P1D"], *NIXL, *WAYS[way], *small) as deployment:
        run_until_preempted(deployment, workload, "decode")


@pytest.fixture(scope="module")
def expected(pushing: Running) -> list[list[int]]:
    return right_answers(pushing)


@pytest.mark.parametrize("victim", ["decode-0", "prefill-1"])
def test_a_killed_engine_takes_no_other_engines_requests_with_it(
    pushing: Running, expected: list[list[int]], victim: str
) -> None:
    """F5."""
    check_that_no_client_notices(pushing, expected, victim)
