"""When an engine is a suspect: silence, late steps, failed probes."""

import pytest

from pdkv.router.engines.health import IDLE_SILENT_TICKS, MUTE_TICKS, SILENT_TICKS, TICK_S, EngineHealth, ProbeResult
from pdkv.wire.messages import Beat


def quiet(ticks: int, *, has_work: bool = True, beats: bool = True) -> EngineHealth:
    health = EngineHealth(beats=beats)
    for _ in range(ticks):
        health.tick(has_work)
    return health


def test_an_engine_with_work_may_be_silent_for_a_shorter_time_than_an_idle_one() -> None:
    assert SILENT_TICKS * TICK_S <= 1.0
    assert quiet(SILENT_TICKS - 1).suspicion == ""
    assert quiet(SILENT_TICKS).suspicion == f"has been silent for {SILENT_TICKS * TICK_S:.1f} s"
    assert quiet(IDLE_SILENT_TICKS - 1, has_work=False).suspicion == ""
    assert quiet(IDLE_SILENT_TICKS, has_work=False).suspicion == "has been silent for 3.0 s"


def test_silence_outlasts_the_work_that_moves_away() -> None:
    """Else it would be given new requests, as it has none, until each of them was taken off again."""
    health = quiet(SILENT_TICKS)
    health.tick(False)
    assert health.silent
    health = quiet(IDLE_SILENT_TICKS - 1, has_work=False)
    health.tick(True)
    assert health.silent, "it has been silent all the while"


@pytest.mark.parametrize("how", ["beat", "message"])
def test_whatever_it_says_ends_its_silence(how: str) -> None:
    health = quiet(IDLE_SILENT_TICKS)
    if how == "beat":
        health.beat(Beat("e", 0.0))
    else:
        health.heard()
    assert health.suspicion == ""
    assert not health.silent


def test_an_engine_without_beats_is_never_silent() -> None:
    health = quiet(100, beats=False)
    assert health.suspicion == ""
    assert health.silent_for_s == 0.0


def test_a_step_is_late_by_half_a_second_or_five_times_its_prediction() -> None:
    health = EngineHealth(beats=True)
    health.beat(Beat("e", 0.49, 0.01))
    assert health.suspicion == ""
    health.beat(Beat("e", 0.51, 0.01))
    assert health.suspicion == "has been in one step for 0.5 s, which should take 0.01 s"
    assert not health.silent, "it gets requests where nobody else is"
    health.beat(Beat("e", 4.9, 1.0))
    assert health.suspicion == ""
    health.beat(Beat("e", 5.1, 1.0))
    assert health.suspicion, "whoever the step is for"
    health.beat(Beat("e", 0.0))
    assert health.suspicion == ""


def test_a_failed_probe_counts_until_something_goes_well() -> None:
    health = EngineHealth(beats=True, last_probe=ProbeResult(0.0, 5.0, "no answer within 5 s"))
    assert health.suspicion == "failed its last probe: no answer within 5 s"
    health.answered(7.0)
    assert health.suspicion == ""
    assert health.last_probe == (7.0, 0.0, "")


def test_a_short_deadline_is_the_engines_fault_only_with_evidence() -> None:
    """Router 2: it never was, so that a hanging engine was the least loaded one for ever."""
    health = quiet(MUTE_TICKS - 1)
    health.beat(Beat("e", 0.0))
    assert not health.explains_timeout()
    health.tick(True)
    health.beat(Beat("e", 0.0))
    assert health.explains_timeout(), "it has work, and does nothing, and says nothing"
    health.beat(Beat("e", 0.6, 2.0))
    assert not health.explains_timeout(), "it is at a long step"
    health.beat(Beat("e", 0.6, 0.0))
    assert health.explains_timeout()
    health.beat(Beat("e", 0.0))
    health.heard()
    assert not health.explains_timeout()
