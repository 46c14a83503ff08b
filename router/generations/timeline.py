"""The timeline of a generation: one leg per Submit, with the durations that its engine reports.

All times are the dispatcher's monotonic clock, in seconds. Access lines, spans, histograms and the admin endpoint read
it; dispatch decides nothing by it.
"""

from dataclasses import dataclass, field
from typing import Literal

from pdkv.router.generations.flow import FlowMessage, RequestFlow
from pdkv.router.histogram import Histogram, bounds
from pdkv.wire.messages import Failed, Finished, HandedOff, Loaded, Submit, Tokens

MAX_LEGS = 64
"""Legs kept for one generation: all that retries and migrations can make by default, and more."""

Part = Literal["prefill", "decode", "all"]


@dataclass(slots=True)
class Leg:
    """One Submit to one engine."""

    part: Part  # "all": one engine does both
    engine: str
    attempt: int
    began: float
    ended: float | None = None
    # "handed_off", "stop", "length", or an error's code; "": it has not ended, or its end was not reported
    outcome: str = ""
    queued_s: float = 0.0  # by the engine's own clock: from its arrival to its first step
    ran_s: float = 0.0  # and from there to its end


@dataclass(slots=True)
class Transfer:
    """KV that a decode engine loaded from a peer, or failed to load."""

    source: str
    target: str
    attempt: int
    ended: float  # when the router was told
    seconds: float  # by the engine's own clock
    num_bytes: int
    code: str  # "": it went well


@dataclass(slots=True)
class Timeline:
    """The timeline of one generation."""

    began: float
    ended: float | None = None
    first_token: float | None = None
    legs: list[Leg] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    num_changes: int = 0  # of legs and transfers

    def sent(self, engine: str, submit: Submit, now: float) -> None:
        """Note a Submit that leaves for an engine."""
        if len(self.legs) < MAX_LEGS:
            part: Part = "all" if submit.kv == "local" else "prefill" if submit.until == "first_token" else "decode"
            self.legs.append(Leg(part, engine, submit.attempt, now))
            self.num_changes += 1

    def heard(self, engine: str, message: FlowMessage, flow: RequestFlow, now: float) -> None:
        """Note an engine's message about the generation; the time of its first Tokens counts."""
        match message:
            case Tokens():
                if self.first_token is None:
                    self.first_token = now
            case HandedOff():
                self._end_leg(engine, message.attempt, now, "handed_off", message.queued_s, message.ran_s)
            case Finished():
                self._end_leg(engine, message.attempt, now, message.reason, message.queued_s, message.ran_s)
            case Failed():
                self._end_leg(engine, message.attempt, now, message.code)
            case Loaded():
                if len(self.transfers) < MAX_LEGS:
                    self.num_changes += 1
                    code = "" if message.ok else message.code or "failed"
                    self.transfers.append(
                        Transfer(
                            flow.source_of(engine),
                            engine,
                            message.attempt,
                            now,
                            message.seconds,
                            message.num_bytes,
                            code,
                        )
                    )

    def close(self, now: float) -> None:
        """Close the timeline: no leg gets further messages. Idempotent."""
        if self.ended is None:
            self.ended = now
            for leg in self.legs:
                if leg.ended is None:
                    leg.ended = now

    def _end_leg(
        self, engine: str, attempt: int, now: float, outcome: str, queued_s: float = 0.0, ran_s: float = 0.0
    ) -> None:
        for leg in self.legs:
            if leg.engine == engine and leg.attempt == attempt and leg.ended is None:
                leg.ended, leg.outcome, leg.queued_s, leg.ran_s = now, outcome, queued_s, ran_s
                self.num_changes += 1
                return


PHASE_S = bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
"""vLLM's bounds of a request's phases, so that its dashboards show them."""

SHORT_S = bounds(
    "0.00001 0.00002 0.00005 0.0001 0.0002 0.0005 0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1 2 5 10 30 60"
)
"""Bounds from a choice among a few engines to a wait in a queue."""

BYTES = tuple(float(4**n << 10) for n in range(12))
"""Bounds from 1 KiB to 4 GiB."""


class Delays:
    """Where the generations of one router spend their time, and how many bytes their transfers carry."""

    def __init__(self) -> None:
        self.balancing = Histogram(SHORT_S)
        self.transfer = Histogram(SHORT_S)
        self.transfer_bytes = Histogram(BYTES)
        self.queue = Histogram(PHASE_S + SHORT_S)
        self.prefill = Histogram(PHASE_S)
        self.decode = Histogram(PHASE_S)
        self.inference = Histogram(PHASE_S)

    def transferred(self, message: Loaded) -> None:
        """Record a successful load from a peer."""
        self.transfer.observe(message.seconds)
        self.transfer_bytes.observe(message.num_bytes)

    def finished(self, timeline: Timeline) -> None:
        """Record a generation that ended well."""
        if timeline.ended is None or timeline.first_token is None:
            return
        first = next((leg for leg in timeline.legs if leg.part != "decode"), None)
        queued_s = first.queued_s if first is not None else 0.0
        prefill_s = max(timeline.first_token - timeline.began - queued_s, 0.0)
        decode_s = timeline.ended - timeline.first_token
        if (
            first is not None and first.outcome
        ):  # else a stop string ended it before its engine reported how long it waited
            self.queue.observe(queued_s)
        self.prefill.observe(prefill_s)
        self.decode.observe(decode_s)
        self.inference.observe(prefill_s + decode_s)
