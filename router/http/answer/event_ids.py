"""Positions in a stream, by which a client that lost its connection goes on after the last event that it has."""

from collections.abc import Sequence

from pdkv.base.limits import clip
from pdkv.errors import InvalidRequest

MAX_CHOICES = 64
"""The most choices of a stream that can be taken up again: each id counts the events of all of them."""


class EventIds:
    """Counts the events of each choice, and last those after all choices (of one choice: together with its own). The
    same request and tokens make the same events, so a position says which ones a client has.
    """

    def __init__(self, resume_id: str, num_choices: int, seen: Sequence[int] = ()) -> None:
        """`resume_id`: "" for events without ids. `seen`: how many events the client has."""
        self._head = resume_id.encode()
        self._counts = [0] * (num_choices + (num_choices > 1))
        self._seen = [*seen, *self._counts][: len(self._counts)]

    def stamp(self, choice: int, data: bytes) -> bytes:
        """Whole events with their ids, without those that the client has; `choice` -1: after all choices."""
        counts, stamped = self._counts, b""
        for event in data.split(b"\n\n")[:-1]:
            counts[choice] += 1
            if counts[choice] <= self._seen[choice]:
                continue
            if self._head:
                event += b"\nid: %b:%b" % (self._head, ",".join(map(str, counts)).encode())
            stamped += event + b"\n\n"
        return stamped


def read_event_id(header: str, text: str) -> tuple[str, tuple[int, ...]]:
    """The resume id of an event's id, or of what is one itself, and the events that the client has. Raises
    InvalidRequest.
    """
    resume_id, _, counts = text.strip().partition(":")
    numbers = counts.split(",") if counts else []
    if len(numbers) > MAX_CHOICES + 1 or not all(n.isascii() and n.isdecimal() and len(n) < 10 for n in numbers):
        raise InvalidRequest(f"{header}: ID:POSITION was expected, an event's id, got {clip(text)!r}", param=header)
    return resume_id, tuple(map(int, numbers))
