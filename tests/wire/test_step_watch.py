"""What an engine's beats say of its steps: how long they have taken, and how long they should."""

import pytest

from pdkv.testing import VirtualClock
from pdkv.wire.heartbeat import BEAT_S, next_beat
from pdkv.wire.messages import Beat
from pdkv.wire.step_watch import FIRST_STEP_S, LATE_S, OTHER_WORK_S, StepTimes, StepWatch, late_after_s


def test_a_first_step_may_take_long_and_a_known_one_half_a_second_or_five_times_as_long() -> None:
    assert late_after_s(FIRST_STEP_S) == 120.0
    assert late_after_s(0.01) == LATE_S
    assert late_after_s(0.2) == 1.0


def test_a_size_is_expected_to_take_what_it_took_and_rises_faster_than_it_falls() -> None:
    times = StepTimes()
    assert times.predict_s(1) == FIRST_STEP_S
    times.note(1, 0.01)
    assert times.predict_s(1) == 0.01
    times.note(1, 0.03)
    assert times.predict_s(1) == pytest.approx(0.02)
    times.note(1, 0.0)
    assert times.predict_s(1) == pytest.approx(0.019)
    for _ in range(200):
        times.note(1, 0.01)
    assert times.predict_s(1) == pytest.approx(0.01, rel=0.01)


def test_a_new_size_is_expected_to_take_as_the_next_smaller_in_proportion_but_no_more_than_the_next_larger() -> None:
    times = StepTimes()
    times.note(16, 0.01)  # 16 to 31 tokens
    assert times.predict_s(31) == 0.01
    assert times.predict_s(64) == pytest.approx(0.04)
    assert times.predict_s(8) == 0.01
    times.note(128, 0.03)
    assert times.predict_s(64) == 0.03
    assert times.predict_s(1 << 60) == FIRST_STEP_S, "a size beyond all is the largest"


def test_the_loop_is_at_its_oldest_step_and_else_at_other_work() -> None:
    clock = VirtualClock(100.0)
    watch = StepWatch(clock)
    assert watch.oldest is None
    watch.wake()
    assert watch.oldest == (100.0, OTHER_WORK_S)
    watch.times.note(8, 0.25)
    watch.begin(8, 100.0)
    watch.begin(8, 100.1)  # one step ahead
    watch.rest()
    assert watch.oldest == (100.0, 0.25)
    watch.end(100.25)
    assert watch.oldest == (100.25, 0.25), "the second one has run since the first one's end"
    watch.end(100.5)
    assert watch.oldest is None
    assert watch.times.predict_s(8) == 0.25
    watch.end(100.5)
    clock.advance(0.5)
    watch.wake()
    assert watch.oldest == (100.5, OTHER_WORK_S)


def test_a_beat_comes_at_the_moment_at_which_a_step_is_late() -> None:
    watch = StepWatch()
    assert next_beat(watch, "e", 100.0) == (Beat("e", 0.0), BEAT_S)
    watch.times.note(8, 0.25)  # late after 1.25 s
    watch.begin(8, 100.0)
    assert next_beat(watch, "e", 100.5) == (Beat("e", 0.5, 0.25), BEAT_S)
    beat, wait_s = next_beat(watch, "e", 101.125)
    assert beat == Beat("e", 1.125, 0.25)
    assert 0.125 < wait_s < 0.13, "just behind the limit"
    assert next_beat(watch, "e", 102.0) == (Beat("e", 2.0, 0.25), BEAT_S)
