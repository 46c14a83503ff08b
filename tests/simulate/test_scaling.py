"""Deployments that scale themselves: nothing is lost, whatever happens to engines that start and leave."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdkv.bench.report import Slo
from pdkv.bench.serve import Pace
from pdkv.bench.workload import Session, one_turn
from pdkv.config import AutoscaleConfig
from pdkv.simulate.deployment import Failure, Topology
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, simulate
from pdkv.testing.paced import read_profile

ENGINE = EngineOptions(replace(read_profile(Path("paced:h100")), prompt_token_s=2e-3), kv_tokens=32_768)
"""One engine takes 0.2 s for a prompt of 100 tokens."""


def burst() -> list[Session]:
    """One prompt a second, ten a second for 15 s, and one a second."""
    times = [*range(10), *(10 + i / 10 for i in range(150)), *range(25, 100)]
    return [one_turn([10 + i % 400, *range(10, 109)], 20, float(at)) for i, at in enumerate(times)]


def scaled(*failures: Failure, **topology: Any) -> dict[str, Any]:
    config = AutoscaleConfig(
        autoscale=("prefill=1..3", "decode=1..2"), slo_ttft_ms=800.0, slo_tpot_ms=100.0, scale_down_after_s=15.0
    )
    _, report = simulate(
        Topology(ENGINE, 1, 1, failures=failures, autoscale=config, start_s=5.0, **topology),
        Load(burst(), Pace(speed=1.0)), [99], Slo({"ttft": 800.0}),
    )  # fmt: skip
    assert (report["completed"], report["failed"], report["unsent"]) == (235, 0, 0)
    found: dict[str, Any] = report["scaling"]
    return found


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    return scaled()


def test_a_burst_is_met_and_engines_go_afterwards(undisturbed: dict[str, Any]) -> None:
    counts = undisturbed["counts"]
    assert counts["start"] == counts["stop"] >= 2
    assert undisturbed["most_engines"] <= 5
    assert undisturbed["figures"]["have"] == {"prefill": 1, "decode": 1}
    assert undisturbed["engine_seconds"] < 100 * undisturbed["most_engines"]


def test_equal_loads_make_equal_decisions(undisturbed: dict[str, Any]) -> None:
    assert scaled() == undisturbed


def test_engines_that_are_killed_while_they_start_work_or_leave_cost_nothing(undisturbed: dict[str, Any]) -> None:
    stops = [each["at"] for each in undisturbed["decisions"] if "drain" in each["reason"]]
    scaled(
        Failure("prefill-1", 18.0, 3.0), Failure("prefill-2", stops[0] - 1.0 + 0.01), Failure("prefill-0", 20.0, 2.0)
    )
