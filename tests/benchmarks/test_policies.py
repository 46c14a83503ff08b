"""What the default policy is worth where engines are nearly at their limit, on a clock of its own."""

import asyncio
import random

import pytest

from benchmarks.policies import make_jobs, simulate
from pdkv.testing.clock import VirtualLoop


def hits(policy: str, *, aggregated: bool) -> float:
    jobs = make_jobs("shared", 250.0, 800, random.Random(1))
    for job in jobs:
        job.num_output = 20 if aggregated else 1
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(simulate(policy, jobs, aggregated=aggregated, seed=1))
    return sum(job.num_cached for job in jobs) / sum(len(job.token_ids) for job in jobs)


@pytest.mark.parametrize("aggregated", [False, True])
def test_the_default_policy_finds_nearly_all_that_an_oracle_finds(aggregated: bool) -> None:
    found = {policy: hits(policy, aggregated=aggregated) for policy in ("prefix_aware", "oracle")}
    assert found["prefix_aware"] >= 0.93 * found["oracle"], found
