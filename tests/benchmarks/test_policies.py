"""What the default policy is worth where engines are nearly at their limit, on a clock of its own."""

import pytest

from benchmarks.policies import Case, play


def hits(policy: str, case: Case) -> float:
    jobs = play(policy, case)
    return sum(job.num_cached for job in jobs) / sum(len(job.token_ids) for job in jobs)


@pytest.mark.parametrize("aggregated", [False, True])
def test_the_default_policy_finds_nearly_all_that_an_oracle_finds(aggregated: bool) -> None:
    case = Case("shared", 150.0 if aggregated else 250.0, 800, aggregated)
    found = {policy: hits(policy, case) for policy in ("prefix_aware", "oracle")}
    assert found["prefix_aware"] >= 0.93 * found["oracle"], found
