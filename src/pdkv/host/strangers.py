"""Connections that are not authenticated yet: if there are too many, the oldest are closed, so that peers can still
connect.
"""

from collections.abc import Mapping
from typing import Protocol, TypeVar

MAX_STRANGERS = 128
MAX_STRANGERS_PER_SOURCE = 96
"""The most unauthenticated connections of one host, or one user of this one, so that others have room; as many peers as
have links may come at once.
"""


class Stranger(Protocol):
    """A connection that is not authenticated."""

    @property
    def source(self) -> str:
        """The host or the user that it comes from."""


Key = TypeVar("Key")


def who_makes_room(strangers: Mapping[Key, Stranger], source: str) -> tuple[Key, str] | None:
    """The connection to close before one more of a source is admitted, and why: the source's oldest, or the oldest of
    all.

    Args:
        strangers: oldest first.
    """
    same = [key for key, stranger in strangers.items() if stranger.source == source]
    if len(same) >= MAX_STRANGERS_PER_SOURCE:
        return same[0], "too many connections from its address"
    if len(strangers) >= MAX_STRANGERS:
        return next(iter(strangers)), "too many connections"
    return None
