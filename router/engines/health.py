"""Detects engines that seem to be stopped or stuck: silence, late steps, failed probes. No clock, no socket.

Silence is counted in ticks of the router's own loop, which handles what has arrived before it ticks again: while that
loop is blocked, no engine's silence grows.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from pdkv.wire.messages import Beat
from pdkv.wire.step_watch import LATE_S, late_after_s

TICK_S = 0.1
"""Seconds between counts of how long the engines have been silent."""

SILENT_TICKS = 8
"""Ticks of silence after which an engine that has work and should beat is a suspect: stopped, or starved."""

IDLE_SILENT_TICKS = 30
"""Ticks of silence after which an engine without work is a suspect."""


MUTE_TICKS = 10
"""Ticks without a word about its work after which an engine that has work but is in no step is a suspect."""


class ProbeResult(NamedTuple):
    """The outcome of the last probe of an engine."""

    at: float  # by the dispatcher's clock
    seconds: float
    fault: str = ""  # empty if it went well

    def describe(self, now: float) -> dict[str, Any]:
        """The result, JSON-ready."""
        return {
            "ok": not self.fault,
            "fault": self.fault or None,
            "age_s": round(now - self.at, 1),
            "took_s": self.seconds,
        }


@dataclass(slots=True)
class EngineHealth:
    """The health of one incarnation of an engine, judged by what it sends."""

    beats: bool = False  # whether it is known to send beats when it has nothing else to say
    quiet_ticks: int = 0  # since anything last arrived from it
    silent: bool = False  # its process seems to be stopped, so that nothing sent there is answered
    mute_ticks: int = 0  # since it last sent anything but a beat
    busy_s: float = 0.0  # how long its oldest step had taken at its last beat
    predicted_s: float = 0.0  # how long that step should take
    last_good: float = 0.0  # when a request or probe last succeeded
    last_probe: ProbeResult | None = None

    def heard(self) -> None:
        """Note a message about requests, its cache or its load."""
        self.quiet_ticks = self.mute_ticks = 0
        self.silent = False

    def beat(self, beat: Beat) -> None:
        """Note a beat, which says what the engine is doing."""
        self.beats = True
        self.quiet_ticks, self.busy_s, self.predicted_s = 0, beat.busy_s, beat.predicted_s
        self.silent = False

    def tick(self, has_work: bool) -> None:
        """Count one tick of TICK_S. An engine that fell silent while it had work counts as silent until it is heard
        again, even if its work goes away.
        """
        self.quiet_ticks += 1
        self.mute_ticks += 1
        if self.beats and self.quiet_ticks >= (SILENT_TICKS if has_work else IDLE_SILENT_TICKS):
            self.silent = True

    def answered(self, now: float) -> None:
        """Note that a request succeeded on the engine, which outweighs an earlier failed probe."""
        self.last_good = now
        if self.last_probe is not None and self.last_probe.fault:
            self.last_probe = ProbeResult(now, 0.0)

    @property
    def silent_for_s(self) -> float:
        """Seconds since anything was heard; 0 for an engine that sends no beats."""
        return round(self.quiet_ticks * TICK_S, 3) if self.beats else 0.0

    def explains_timeout(self) -> bool:
        """Whether there is evidence that a request with a short deadline missed it through the engine's fault: the
        engine is a suspect, or has had work for a while without running a step or sending anything.
        """
        return bool(self.suspicion) or (self.mute_ticks >= MUTE_TICKS and self.busy_s < LATE_S)

    @property
    def late_s(self) -> float | None:
        """How long its oldest step has taken, if that is far longer than it should."""
        return self.busy_s + self.silent_for_s if self.busy_s > late_after_s(self.predicted_s) else None

    @property
    def suspicion(self) -> str:
        """Why it seems to be stopped or stuck, as a phrase that follows the engine's name. Empty if it does not."""
        if self.silent:
            return f"has been silent for {self.silent_for_s:.1f} s"
        if self.late_s is not None:
            return f"has been in one step for {self.busy_s:.1f} s, which should take {self.predicted_s:.3g} s"
        if self.last_probe is not None and self.last_probe.fault:
            return f"failed its last probe: {self.last_probe.fault}"
        return ""
