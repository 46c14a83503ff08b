"""Whether an engine seems to be stopped or stuck: silence, late steps, failed probes. No clock, no socket.

Silence is counted in ticks of the router's own loop, which handles what has arrived before it ticks again: while that
loop is held up, no engine grows silent.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdkv.wire.messages import Beat
from pdkv.wire.step_watch import LATE_S, late_after_s

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""How often the router counts for how long its engines have been silent."""

SILENT_TICKS = 8
"""An engine that has work, should beat and has said nothing for so many ticks is a suspect: stopped, or starved."""

IDLE_SILENT_TICKS = 30
"""And one that has none."""


MUTE_TICKS = 10
"""An engine that is in no step, has work and has not said a word about it for so many ticks does not do it."""


class ProbeResult(NamedTuple):
    """How the last probe of an engine ended."""

    at: float  # of the dispatcher's clock
    seconds: float
    fault: str = ""  # empty: it went well

    def describe(self, now: float) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "ok": not self.fault,
            "fault": self.fault or None,
            "age_s": round(now - self.at, 1),
            "took_s": self.seconds,
        }


class HealthSnapshot(NamedTuple):
    """What the router thinks of its engines, for metrics."""

    open_breakers: Collection[str]  # engines
    num_pairs_open: int
    probes_ok: int
    probes_failed: int
    num_moved: int  # requests


@dataclass(slots=True)
class EngineHealth:
    """One incarnation of an engine, by what it says."""

    beats: bool = False  # whether it is known to say that it lives while it has nothing else to say
    quiet_ticks: int = 0  # since it was heard last
    silent: bool = False  # its process seems to be stopped: what is sent there is answered by nobody
    mute_ticks: int = 0  # since it said anything but that it lives
    busy_s: float = 0.0  # how long its oldest step had taken, at its last beat
    predicted_s: float = 0.0  # how long that step should take
    last_good: float = 0.0  # when a request or probe last went well
    last_probe: ProbeResult | None = None

    def heard(self) -> None:
        """It said something about requests, its cache or its load."""
        self.quiet_ticks = self.mute_ticks = 0
        self.silent = False

    def beat(self, beat: Beat) -> None:
        """It said that it lives, and what it is at."""
        self.beats = True
        self.quiet_ticks, self.busy_s, self.predicted_s = 0, beat.busy_s, beat.predicted_s
        self.silent = False

    def tick(self, has_work: bool) -> None:
        """TICK_S have passed. Who is silent with work stays so until it is heard, although its work may go."""
        self.quiet_ticks += 1
        self.mute_ticks += 1
        if self.beats and self.quiet_ticks >= (SILENT_TICKS if has_work else IDLE_SILENT_TICKS):
            self.silent = True

    def answered(self, now: float) -> None:
        """A request went well there: a probe that failed before says nothing any more."""
        self.last_good = now
        if self.last_probe is not None and self.last_probe.fault:
            self.last_probe = ProbeResult(now, 0.0)

    @property
    def silent_for_s(self) -> float:
        """For how long nothing was heard; 0 for an engine that sends no beats."""
        return round(self.quiet_ticks * TICK_S, 3) if self.beats else 0.0

    def explains_timeout(self) -> bool:
        """Whether there is evidence that a request whose deadline was short missed it by the engine's fault.

        It is a suspect, or it has work, does nothing, and has said nothing of it for a while.
        """
        return bool(self.suspicion) or (self.mute_ticks >= MUTE_TICKS and self.busy_s < LATE_S)

    @property
    def late_s(self) -> float | None:
        """How long its oldest step has taken, where that is far longer than it should."""
        return self.busy_s + self.silent_for_s if self.busy_s > late_after_s(self.predicted_s) else None

    @property
    def suspicion(self) -> str:
        """Why it seems to be stopped or stuck, for people: goes on behind the engine's name. Empty: it does not."""
        if self.silent:
            return f"has been silent for {self.silent_for_s:.1f} s"
        if self.late_s is not None:
            return f"has been at one step for {self.busy_s:.1f} s, which should take {self.predicted_s:.3g} s"
        if self.last_probe is not None and self.last_probe.fault:
            return f"failed its last probe: {self.last_probe.fault}"
        return ""


def log_suspects(before: Collection[str], now: Mapping[str, str]) -> None:
    """Say which engines have become suspects (`now`: with why), and which are none any more."""
    for name in now.keys() - set(before):
        logger.warning("%s is a suspect: it %s", name, now[name])
    for name in set(before) - now.keys():
        logger.info("%s is no suspect any more", name)
