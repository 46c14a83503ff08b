"""When an engine is a suspect: silence, late steps, failed probes."""

import pytest

from pdkv.router.health import IDLE_SILENT_TICKS, MUTE_TICKS, SILENT_TICKS, TICK_S, EngineHealth, ProbeResult
from pdkv.wire.messages import Beat


def quiet(ticks: int) -> EngineHealth:
    health = EngineHealth(beats=True)
    for _ in range(ticks):
        health.tick()
    return health


def test_an_engine_with_work_may_be_silent_for_a_shorter_time_than_an_idle_one() -> None:
    assert SILENT_TICKS * TICK_S <= 1.0
    assert quiet(SILENT_TICKS - 1).suspicion(True) == ""
    assert quiet(SILENT_TICKS).suspicion(True) == f"has been silent for {SILENT_TICKS * TICK_S:.1f} s"
    assert quiet(SILENT_TICKS).suspicion(False) == ""
    assert quiet(IDLE_SILENT_TICKS).suspicion(False) == "has been silent for 3.0 s"


@pytest.mark.parametrize("how", ["beat", "message"])
def test_whatever_it_says_ends_its_silence(how: str) -> None:
    health = quiet(IDLE_SILENT_TICKS)
    if how == "beat":
        health.beat(Beat("e", 0.0))
    else:
        health.heard()
    assert health.suspicion(True) == ""
    assert not health.is_silent(True)


def test_an_engine_without_beats_is_never_silent() -> None:
    health = EngineHealth(beats=False)
    for _ in range(100):
        health.tick()
    assert health.suspicion(True) == ""
    assert health.silent_for_s == 0.0


def test_a_step_is_late_by_half_a_second_or_five_times_its_prediction() -> None:
    health = EngineHealth(beats=True)
    health.beat(Beat("e", 0.49, 0.01))
    assert health.suspicion(True) == ""
    health.beat(Beat("e", 0.51, 0.01))
    assert health.suspicion(True) == "has been at one step for 0.5 s, which should take 0.01 s"
    assert not health.is_silent(True), "it gets requests where nobody else is"
    health.beat(Beat("e", 4.9, 1.0))
    assert health.suspicion(True) == ""
    health.beat(Beat("e", 5.1, 1.0))
    assert health.suspicion(False), "whoever the step is for"
    health.beat(Beat("e", 0.0))
    assert health.suspicion(True) == ""


def test_a_failed_probe_counts_until_something_goes_well() -> None:
    health = EngineHealth(beats=True, last_probe=ProbeResult(0.0, 5.0, "no answer within 5 s"))
    assert health.suspicion(False) == "failed its last probe: no answer within 5 s"
    health.answered(7.0)
    assert health.suspicion(False) == ""
    assert health.last_probe == (7.0, 0.0, "")


def test_a_short_deadline_is_the_engines_fault_only_with_evidence() -> None:
    """Router 2: it never was, so that a hanging engine was the least loaded one for ever."""
    health = quiet(MUTE_TICKS - 1)
    health.beat(Beat("e", 0.0))
    assert not health.explains_timeout(True)
    health.tick()
    health.beat(Beat("e", 0.0))
    assert health.explains_timeout(True), "it has work, and does nothing, and says nothing"
    health.beat(Beat("e", 0.6, 2.0))
    assert not health.explains_timeout(True), "it is at a long step"
    health.beat(Beat("e", 0.6, 0.0))
    assert health.explains_timeout(True)
    health.beat(Beat("e", 0.0))
    health.heard()
    assert not health.explains_timeout(True)
