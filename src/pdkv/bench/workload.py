"""What is sent, and when: sessions of one or several turns, and the times at which they begin."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from pdkv.errors import ConfigError

Prompt = list[int] | str
"""Token ids or text."""

FIRST_ID, LAST_ID = 10, 500
"""Random token ids lie in [FIRST_ID, LAST_ID), which every vocabulary has."""


def units(prompt: Prompt) -> list[Any]:
    """What a prompt is counted in: token ids, or the words of a text."""
    return prompt if isinstance(prompt, list) else prompt.split()


class Turn(msgspec.Struct, frozen=True):
    """One request. Behind the first turn of a session, its prompt follows the text that is there by then."""

    prompt: Prompt
    max_tokens: int
    pause_s: float = 0.0
    """Seconds between the end of the answer before it, for example for a tool, and this request."""
    is_whole: bool = False
    """Whether the prompt stands alone, also behind the first turn, since it has the turns before it already."""
    priority: int = 0


class Session(msgspec.Struct, frozen=True):
    """Turns that follow each other."""

    turns: Sequence[Turn]
    at_s: float | None = None
    """When it begins in a trace, in seconds from the trace's beginning."""


def one_turn(prompt: Prompt, max_tokens: int, at_s: float | None = None) -> Session:
    """A session that is a single request."""
    return Session((Turn(prompt, max_tokens),), at_s)


def arrivals(
    sessions: Sequence[Session], rng: random.Random, *, rate: float, burstiness: float = 1.0, speed: float = 0.0
) -> Iterator[float]:
    """When each session begins, in seconds from the start.

    Args:
        rate: sessions a second; infinite: all at once.
        burstiness: shape of the gamma distribution of the gaps, as in `vllm bench serve`: 1 is Poisson, less is
            burstier, infinite is even.
        speed: if not 0, the sessions begin at the trace's own times, so many times as fast.
    """
    if speed:
        times = [session.at_s for session in sessions if session.at_s is not None]
        if len(times) < len(sessions):
            raise ConfigError("the arrivals of a trace were asked for, but these data have no times")
        yield from ((at_s - times[0]) / speed for at_s in times)
        return
    now = 0.0
    for _ in sessions:
        yield now
        if rate < float("inf"):
            mean = 1 / rate
            now += mean if burstiness == float("inf") else rng.gammavariate(burstiness, mean / burstiness)
