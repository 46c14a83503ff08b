"""Plans of drawn traces, measured in the simulator."""

from pathlib import Path

import pytest

from benchmarks.plan_traces import KINDS, KV_TOKENS, Trial, judge
from pdkv.simulate.engine import EngineOptions
from pdkv.testing.paced import read_profile


def trial(name: str, rate: float) -> Trial:
    engine = EngineOptions(read_profile(Path("paced:h100")), kv_tokens=KV_TOKENS)
    return Trial(KINDS[name]._replace(rate=rate), engine, 2)


def test_a_draw_has_its_turns_and_the_same_seed_draws_it_again() -> None:
    first, again, other = (trial("agents", 2.0).load(4.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {len(session.turns) for session in first.sessions} == {8}


def test_a_plan_is_measured_on_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge("labels", trial("labels", 4.0), 4.0, real=False)
    assert capsys.readouterr().out.startswith("| labels | ")
