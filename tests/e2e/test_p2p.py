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
    run_until_preempted,
)

P2P = ("--connector", "p2p")


@pytest.mark.parametrize("order", ["concurrent", pytest.param("needs_peer_first", marks=pytest.mark.slow)])
def test_first_pass_and_replay(workload: Workload, order: str) -> None:
    with deployed(workload, *P2P, *CHUNKED, *TOPOLOGIES["2P2D"], "--order", order) as deployment:
        run_twice(deployment, workload)


@pytest.mark.slow  # preemptions over pushes are in every run of the state machine
@pytest.mark.parametrize("order", ["needs_peer_first", "concurrent"])
def test_small_pools_on_both_sides(workload: Workload, order: str) -> None:
    """Neither pool waits for the other for ever, and preemption on decode takes no KV back to prefill."""
    small = (*SMALL_PREFILL_POOL, *SMALL_DECODE_POOL)
    with deployed(workload, *TOPOLOGIES["1P1D"], *P2P, "--order", order, *small) as deployment:
        run_until_preempted(deployment, workload, "decode")
