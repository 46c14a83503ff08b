"""W3C Trace Context, level 1: the `traceparent` header (https://www.w3.org/TR/trace-context/)."""

import random
import re
from typing import NamedTuple

MAX_TRACEPARENT_CHARS = 55
"""Length of version 00, the version that is sent on."""

_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^\n]*)?")
_MAX_CHARS = 512  # a future version, which may have more after the flags

_generator = random.Random(random.SystemRandom().getrandbits(128))  # not shared with a forked sibling


class TraceContext(NamedTuple):
    """The trace that a request belongs to, and its parent span."""

    trace_id: str  # 32 hexadecimal digits, not all of them 0
    parent_id: str  # also 16
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """The header's value, version 00."""
        return f"00-{self.trace_id}-{self.parent_id}-{'01' if self.sampled else '00'}"


def parse_traceparent(text: str) -> TraceContext | None:
    """The content of the header; None if it is invalid by the standard, and therefore ignored."""
    match = _PATTERN.fullmatch(text) if len(text) <= _MAX_CHARS else None
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None) or not trace_id.strip("0") or not parent_id.strip("0"):
        return None
    return TraceContext(trace_id, parent_id, sampled=bool(int(flags, 16) & 1))


def new_trace(*, sampled: bool = False) -> TraceContext:
    """A new trace. Its ids are unique, but not secret."""
    return TraceContext(f"{_generator.getrandbits(128) or 1:032x}", f"{_generator.getrandbits(64) or 1:016x}", sampled)


def trace_id_of(traceparent: str) -> str:
    """The trace id in a value made by `TraceContext.traceparent`; "" for ""."""
    return traceparent[3:35]
