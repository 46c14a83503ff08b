"""A profile of an engine's steps: the order, and what came of it."""

from typing import Annotated

from msgspec import Meta

from pdkv.wire.types import Count, Id, Message, Text

MAX_PROFILE_S, MAX_PROFILE_STEPS, MAX_PROFILE_BYTES = 60.0, 256, 128 << 20
"""The longest profile, and the largest file that is kept of one; each engine keeps its latest."""

WRITE_S = 30.0
"""Seconds for the end of a trace, and for its file."""


class Profile(Message, frozen=True, kw_only=True):
    """Trace the next steps with torch.profiler, for at most this many or this long; answered by a Profiled."""

    order_id: Id
    steps: Annotated[int, Meta(ge=1, le=MAX_PROFILE_STEPS)]
    seconds: Annotated[float, Meta(gt=0, le=MAX_PROFILE_S)]

    @property
    def timeout_s(self) -> float:
        """Seconds within which the answer comes."""
        return self.seconds + WRITE_S

    def failed(self, code: str, problem: str) -> "Profiled":
        """The answer that there is no trace, and why."""
        return Profiled(self.order_id, code=code, problem=problem)


class Profiled(Message, frozen=True):
    """The trace of an engine, as a file in its launch's private directory; or why there is none."""

    order_id: Id
    file: Text = ""
    num_bytes: Count = 0
    steps: Count = 0  # that were not empty
    code: Id = ""
    problem: Text = ""
