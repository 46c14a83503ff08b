"""What the default policy is worth where engines are nearly at their limit, in the simulator."""

import pytest

from benchmarks.policies import Case, hits, play


@pytest.mark.parametrize("aggregated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_default_policy_finds_nearly_all_that_an_oracle_finds(aggregated: bool) -> None:
    case = Case("shared", 150.0 if aggregated else 250.0, 800, aggregated)
    found = {policy: hits(play(policy, case)) for policy in ("prefix_aware", "oracle")}
    assert found["prefix_aware"] >= 0.93 * found["oracle"], found
