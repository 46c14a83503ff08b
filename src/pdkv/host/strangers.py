"""Connections that are not authenticated yet: if there are too many, the oldest are closed, so that peers can still
connect.
"""

from collections.abc import Mapping
from typing import TypeVar

MAX_STRANGERS = 128
MAX_STRANGERS_PER_SOURCE = 96
"""The most unauthenticated connections of one host, or one user of this one, so that others have room; as many peers as
have links may come at once.
"""


Key = TypeVar("Key")


def who_makes_room(sources: Mapping[Key, str], source: str) -> tuple[Key, str] | None:
    """The connection to close before one more of a source is admitted, and why: the source's oldest, or the oldest of
    all.

    Args:
        sources: the host or user that each unauthenticated connection comes from, oldest first.
    """
    same = [key for key, of in sources.items() if of == source]
    if len(same) >= MAX_STRANGERS_PER_SOURCE:
        return same[0], "too many connections from its address"
    if len(sources) >= MAX_STRANGERS:
        return next(iter(sources)), "too many connections"
    return None
