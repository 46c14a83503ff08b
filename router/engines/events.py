"""What happened to the engines lately, for people who watch: nothing decides by it."""

from collections import deque
from itertools import islice

import msgspec

from pdkv.base.limits import clip

MAX_EVENTS = 256
"""Events that are kept."""

MERGED_S, NUM_OPEN = 2.0, 8
"""Seconds within which the same happening is one event with a count, if it is among so many latest ones."""


class Event(msgspec.Struct, omit_defaults=True):
    """One happening."""

    number: int
    at: float  # by the dispatcher's clock, in seconds
    kind: str  # up, down, refused, suspect, well, ejected, recovered, moved (requests, off it) or operator
    engine: str
    text: str
    count: int = 1


class Events:
    """The latest events. Whatever happens, and however often, costs a bounded amount of memory."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._num = 0

    def note(self, now: float, kind: str, engine: str = "", text: str = "") -> None:
        """Add one event."""
        text = clip(text, 256)
        for event in islice(reversed(self._events), NUM_OPEN):
            if (event.kind, event.engine, event.text) == (kind, engine, text) and now - event.at < MERGED_S:
                event.count += 1
                return
        self._num += 1
        self._events.append(Event(self._num, now, kind, engine, text))

    def latest(self, most: int) -> list[Event]:
        """At most `most` events, the latest first."""
        return list(islice(reversed(self._events), most))
