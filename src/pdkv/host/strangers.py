"""Connections that have not said yet who they are: of a crowd the oldest go, so that peers get in."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

MAX_STRANGERS = 128
MAX_STRANGERS_PER_SOURCE = 96
"""One host, or one user of this one, leaves others some room; and as many peers as have links may come at once."""


class Stranger(Protocol):
    """One of them."""

    @property
    def source(self) -> str:
        """The host or the user that it comes from."""


Key = TypeVar("Key")


def who_makes_room(strangers: Mapping[Key, Stranger], source: str) -> tuple[Key, str] | None:
    """Who has to go before one more of a source comes, and why: the oldest of the same one, or the oldest of all.

    Args:
        strangers: the oldest first.
    """
    same = [key for key, stranger in strangers.items() if stranger.source == source]
    if len(same) >= MAX_STRANGERS_PER_SOURCE:
        return same[0], "too many connections from its address"
    if len(strangers) >= MAX_STRANGERS:
        return next(iter(strangers)), "too many connections"
    return None
