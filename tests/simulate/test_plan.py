"""Plans: which division is recommended, and that it says no."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdkv.bench.datasets import Maker, Shape, load
from pdkv.bench.serve import Pace
from pdkv.bench.workload import one_turn
from pdkv.simulate.engine import EngineOptions
from pdkv.simulate.load import Load, as_tokens
from pdkv.simulate.plan import Division, Question, divisions, plan
from pdkv.testing.paced import read_profile

PROFILE = read_profile(Path("paced:h100"))


def question(tpot_s: float, rate: float, *, slo_ttft_s: float = 1.0, **profile: Any) -> Question:
    shape = Shape(num_prompts=16, input_len=1500, output_len=10)
    data = load("random", None, shape, Maker(1, as_text=False))
    engine = EngineOptions(replace(PROFILE, **profile), kv_tokens=65_536)
    return Question(Load(data, Pace(rate=rate)), 2, engine, slo_ttft_s, tpot_s)


def test_apart_where_prompts_would_hold_decodes_up() -> None:
    found = plan(question(0.009, 8.0))
    assert found.best.division.prefill == 1
    assert "Disaggregation pays" in found.why


def test_together_where_moving_kv_costs_more() -> None:
    found = plan(question(0.1, 8.0, transfer_token_s=1e-3))
    assert found.best.division == Division(0, 2)
    assert "does not pay" in found.why
    assert found.best.rate >= 8.0
    assert found.describe()["recommended"]["prefill"] == 0


def test_a_rate_that_is_too_high_is_answered_with_what_is_possible() -> None:
    found = plan(question(0.1, 40.0, slo_ttft_s=0.2))
    assert 0 < found.best.rate < 40.0
    assert "less than asked for" in found.why


def test_many_engines_are_divided_by_eighths() -> None:
    assert len(list(divisions(2))) == 3
    counts = [division.prefill for division in divisions(80)]
    assert counts == [0, *(x for n in range(10, 80, 10) for x in (n, n))]


def test_a_trace_keeps_its_pattern_at_another_rate() -> None:
    found = Load([one_turn([5] * 40, 3, at_s) for at_s in (2.0, 3.0, 6.0)], Pace(speed=1.0))
    assert found.rate == pytest.approx(0.5)
    assert found.at_rate(1.0).pace.speed == pytest.approx(2.0)


def test_the_words_of_a_text_are_tokens() -> None:
    [session] = as_tokens([one_turn("way home way", 3)])
    [first, second, third] = session.turns[0].prompt
    assert first == third != second
