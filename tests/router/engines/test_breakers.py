"""Breakers: a rate of failures in a window opens them, one trial at a time closes them, a crash loop does not."""

import pytest

from pdkv.router.engines.breakers import (
    CRASH_WINDOW_S,
    CRASHES,
    MIN_EVENTS,
    OPEN_S,
    PAIR_MIN_EVENTS,
    TRIAL_S,
    WINDOW_S,
    Breaker,
    PairBreakers,
    common_sides,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(MIN_EVENTS):
        breaker.failed(now)
    assert breaker.state(now) == "open"
    return breaker


def test_a_few_failures_open_nothing() -> None:
    breaker = Breaker()
    for _ in range(MIN_EVENTS - 1):
        breaker.failed(0.0)
    assert breaker.state(0.0) == "closed"
    assert breaker.passes(0.0)
    breaker.failed(0.0)
    assert breaker.state(0.0) == "open"
    assert not breaker.passes(0.0)


def test_an_engine_that_fails_every_second_request_is_open() -> None:
    """Router 20: a single success set the count back, so that it never opened."""
    breaker = Breaker()
    for second in range(MIN_EVENTS):
        breaker.succeeded(float(second))
        breaker.failed(float(second))
    assert breaker.state(float(MIN_EVENTS)) == "open"


def test_a_share_below_half_opens_nothing() -> None:
    breaker = Breaker()
    for i in range(100):
        breaker.succeeded(0.1 * i)
        breaker.succeeded(0.1 * i)
        breaker.failed(0.1 * i)
    assert breaker.state(10.0) == "closed"


def test_what_is_older_than_the_window_does_not_count() -> None:
    breaker = Breaker()
    for _ in range(MIN_EVENTS - 1):
        breaker.failed(0.0)
    breaker.failed(WINDOW_S + 1.0)
    assert breaker.state(WINDOW_S + 1.0) == "closed"
    for _ in range(50):
        breaker.succeeded(2 * WINDOW_S)
    for _ in range(MIN_EVENTS):
        breaker.failed(3 * WINDOW_S + 2.0)
    assert breaker.state(3 * WINDOW_S + 2.0) == "open", "old successes do not help either"


def test_half_open_lets_one_trial_through_and_a_success_closes() -> None:
    breaker = opened()
    breaker.begin_trial(1.0)
    assert not breaker.passes(OPEN_S - 0.1)
    assert breaker.state(OPEN_S) == "half_open"
    assert breaker.passes(OPEN_S)
    breaker.begin_trial(OPEN_S)
    assert not breaker.passes(OPEN_S)
    breaker.succeeded(OPEN_S + 1.0)
    assert breaker.state(OPEN_S + 1.0) == "closed"
    for _ in range(MIN_EVENTS - 1):
        breaker.failed(OPEN_S + 1.0)
    assert breaker.passes(OPEN_S + 1.0), "it began to count anew"


def test_half_open_and_a_failure_is_open_again() -> None:
    breaker = opened()
    breaker.begin_trial(OPEN_S)
    breaker.failed(OPEN_S + 1.0)
    assert breaker.state(OPEN_S + 1.0) == "open"
    assert breaker.state(2 * OPEN_S + 1.0) == "half_open"
    assert breaker.passes(2 * OPEN_S + 1.0)


def test_a_trial_of_which_nothing_is_heard_ends() -> None:
    breaker = opened()
    breaker.begin_trial(OPEN_S)
    assert not breaker.passes(OPEN_S + TRIAL_S - 0.1)
    assert breaker.passes(OPEN_S + TRIAL_S)


def test_successes_of_what_was_under_way_do_not_close_an_open_breaker() -> None:
    breaker = opened()
    for _ in range(100):
        breaker.succeeded(1.0)
    assert breaker.state(1.0) == "open"


def test_a_crash_loop_stays_open_whatever_succeeds_in_between() -> None:
    """Router 20: an engine that came back had a clean record."""
    breaker = Breaker()
    for i in range(CRASHES):
        assert breaker.state(5.0 * i) == "closed"
        for _ in range(10):
            breaker.succeeded(5.0 * i)
        breaker.died(5.0 * i)
    now = 5.0 * (CRASHES - 1)
    assert breaker.state(now) == "open"
    breaker.succeeded(now + OPEN_S)  # the trial
    assert breaker.state(now + OPEN_S) == "open"
    later = now + CRASH_WINDOW_S + 1.0
    assert breaker.state(later) == "half_open"
    breaker.succeeded(later)
    assert breaker.state(later) == "closed"


def test_a_death_is_one_failure() -> None:
    breaker = Breaker()
    breaker.died(0.0)
    breaker.died(1.0)
    assert breaker.state(1.0) == "closed"


def test_a_pair_opens_by_itself() -> None:
    pairs = PairBreakers()
    assert pairs.avoided(0.0) == frozenset()
    pairs.loaded("p0", "d0", True, 0.0)
    pairs.loaded("p0", "d1", True, 0.0)
    for _ in range(PAIR_MIN_EVENTS):
        pairs.loaded("p0", "d0", False, 0.0)
    assert pairs.avoided(0.0) == {("p0", "d0")}
    assert pairs.states(0.0) == {("p0", "d0"): "open"}
    assert pairs.avoided(OPEN_S) == frozenset()
    pairs.begin_trial("p0", "d0", OPEN_S)
    pairs.begin_trial("p1", "d0", OPEN_S)  # of which nothing is known
    assert pairs.avoided(OPEN_S) == {("p0", "d0")}
    pairs.loaded("p0", "d0", True, OPEN_S)
    assert pairs.states(OPEN_S) == {}
    pairs.loaded("p0", "d0", False, OPEN_S)
    pairs.loaded("p0", "d0", False, OPEN_S)
    pairs.forget("d0")
    assert pairs.avoided(OPEN_S) == frozenset()


@pytest.mark.parametrize(
    ("pairs", "suspected"),
    [
        ([], set()),
        ([("p0", "d0")], set()),
        ([("p0", "d0"), ("p1", "d0")], {"d0"}),
        ([("p0", "d0"), ("p0", "d1")], {"p0"}),
        ([("p0", "d0"), ("p1", "d1")], set()),
        ([("p0", "d0"), ("p1", "d0"), ("p0", "d1")], {"p0", "d0"}),
    ],
)
def test_only_what_several_failing_pairs_have_in_common_is_suspected(
    pairs: list[tuple[str, str]], suspected: set[str]
) -> None:
    assert common_sides(frozenset(pairs)) == suspected


def test_pairs_cost_by_those_that_fail_and_what_is_not_used_any_more_goes() -> None:
    pairs = PairBreakers()
    for i in range(1000):
        pairs.loaded(f"p{i}", "d", True, 0.0)
    pairs.loaded("p0", "d", False, 0.0)
    pairs.loaded("p0", "d", False, 0.0)
    assert len(pairs._failing) == 1
    assert pairs.avoided(0.0) == {("p0", "d")}
    later = WINDOW_S + 1.0
    for _ in range(1000):
        pairs.loaded("p1", "d", True, later)
    assert pairs._pairs.keys() == {("p0", "d"), ("p1", "d")}, "what failed waits for its trial"
    assert pairs.states(later) == {("p0", "d"): "half_open"}
    pairs.loaded("p0", "d", True, later)
    assert not pairs.states(later)
