"""Deployments over p2p, in every order that a push allows: right tokens, none of the prompt computed by decode."""

import pytest
from equality import (
    CHUNKED,
    SMALL_DECODE_POOL,
    SMALL_PREFILL_POOL,
    TOPOLOGIES,
    Workload,
    deployed,
    run_twice,
    run_twice_preempted,
)

P2P = ("--connector", "p2p")


@pytest.mark.parametrize(
    ("topology", "order"),
    [
        ("2P2D", "concurrent"),
        pytest.param("1P1D", "needs_peer_first", marks=pytest.mark.slow),
        pytest.param("1P1D", "concurrent", marks=pytest.mark.slow),
        pytest.param("2P2D", "needs_peer_first", marks=pytest.mark.slow),
    ],
)
def test_first_pass_and_replay(workload: Workload, topology: str, order: str) -> None:
    check_both_passes(workload, *TOPOLOGIES[topology], "--order", order)


def check_both_passes(workload: Workload, *flags: str) -> None:
    with deployed(workload, *P2P, *CHUNKED, *flags) as deployment:
        run_twice(deployment, workload)


@pytest.mark.slow  # preemptions over pushes are in every run of the state machine
@pytest.mark.parametrize("order", ["needs_peer_first", "concurrent"])
def test_small_pools_on_both_sides(workload: Workload, order: str) -> None:
    """Neither pool waits for the other for ever, and preemption on decode takes no KV back to prefill."""
    small = (*SMALL_PREFILL_POOL, *SMALL_DECODE_POOL)
    with deployed(workload, *TOPOLOGIES["1P1D"], *P2P, "--order", order, *small) as deployment:
        run_twice_preempted(deployment, workload)


@pytest.mark.parametrize(
    ("ranks", "order"),
    [pytest.param(("2", "1"), "needs_peer_first", marks=pytest.mark.slow), (("1", "2"), "concurrent")],
    ids=["2-1", "1-2"],
)
def test_unequal_blocks_and_ranks(workload: Workload, ranks: tuple[str, str], order: str) -> None:
    """F20: decode computes no prompt token, whatever ranks hold the heads."""
    sizes = ("--prefill-block-size", "16", "--decode-block-size", "32")
    tp = ("--prefill-tp", ranks[0], "--decode-tp", ranks[1])
    check_both_passes(workload, *TOPOLOGIES["1P1D"], *sizes, *tp, "--order", order)
