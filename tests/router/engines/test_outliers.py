"""Scores: what ejects an engine, for how long, and what brings it back."""

import pytest

from pdkv.router.engines.outliers import DEATHS, HOLD_S, MAX_HOLD_S, MIN_PACES, TRIAL_S, OutlierScore, Usual, typical


def scored(events: str, *, apart_s: float = 1.0) -> float:
    """The score behind successes (.), failures (x), deaths (D) and slow answers (s)."""
    score, now = OutlierScore(), 0.0
    for event in events:
        now += apart_s
        if event == ".":
            score.succeeded(now, 1.0)
        elif event == "x":
            score.failed(now)
        elif event == "D":
            score.died(now)
        else:
            score.paced(10.0)
    return score.value(now, 1.0)


@pytest.mark.parametrize(
    ("events", "is_outlier"),
    [
        ("xx", False),
        ("...........xxx", True),
        ("x.x.x.x.x.x.x", True),  # Router 20: a single success set the count back
        ("..........x" * 10, False),
        ("DD", False),
        ("D..........D..........D", True),  # Router 20: an engine that came back had a clean record
        ("s" * (MIN_PACES - 1), False),
        ("s" * MIN_PACES, True),
    ],
)
def test_what_makes_an_outlier(events: str, is_outlier: bool) -> None:
    assert (scored(events) >= 1.0) == is_outlier


def test_failures_fade() -> None:
    score = OutlierScore()
    for _ in range(10):
        score.failed(0.0)
    assert score.value(0.0, 1.0) > 1.0
    assert score.value(120.0, 1.0) < 1.0


def test_holds_grow_with_each_ejection_and_shrink_when_it_is_well_for_long() -> None:
    score, now, holds = OutlierScore(), 0.0, []
    for _ in range(9):
        score.eject(now)
        holds.append(score.held_until(now) - now)
        now += holds[-1]
        assert score.awaits_trial(now)
        score.begin_trial(now)
        assert score.held_until(now) == now + TRIAL_S, "one at a time"
        score.failed(now)
    assert holds[:3] == [HOLD_S, 4 * HOLD_S, 16 * HOLD_S], "each failed trial is an ejection, too"
    assert holds[-1] == MAX_HOLD_S
    score.begin_trial(now := score.held_until(now))
    score.succeeded(now, 1.0)
    assert not score.is_ejected
    score.eject(now + 3600.0)
    assert score.held_until(now + 3600.0) == now + 3600.0 + HOLD_S


def test_what_began_before_decides_no_trial() -> None:
    score = OutlierScore()
    score.eject(0.0)
    score.succeeded(1.0, 1.0)
    score.succeeded(HOLD_S + 1.0, 1.0)
    assert score.is_ejected


@pytest.mark.parametrize("pace", [1.5, 4.0])
def test_a_trial_shows_whether_it_is_still_slow(pace: float) -> None:
    score = OutlierScore()
    score.eject(0.0)
    score.begin_trial(HOLD_S)
    score.paced(pace)
    score.succeeded(HOLD_S, 1.0)
    assert score.is_ejected == (pace > 2.0)


def test_a_crash_loop_is_not_over_when_something_succeeds() -> None:
    score = OutlierScore()
    for _ in range(3):
        score.died(0.0)
    score.eject(0.0)
    score.begin_trial(HOLD_S)
    score.succeeded(HOLD_S, 1.0)
    assert score.is_ejected
    assert DEATHS < 3


def test_longer_prompts_may_take_longer_and_short_ones_are_not_expected_to_be_quick() -> None:
    usual = Usual()
    assert [round(usual.relate(1000, 1.0), 3) for _ in range(3)] == [1.0, 1.0, 1.0]
    assert usual.relate(4000, 4.0) == pytest.approx(1.0)
    assert usual.relate(10, 1.0) == pytest.approx(1.0, rel=0.3)
    assert Usual().relate(0, 0.0) == 1.0


def test_the_typical_engine_is_no_outlier_of_two() -> None:
    assert [typical(values) for values in ([], [3.0], [9.0, 1.0], [9.0, 1.0, 2.0])] == [0.0, 3.0, 1.0, 2.0]
