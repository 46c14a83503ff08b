"""Routing policies: functions from a snapshot of one side's candidates to the chosen engine.

They read no clock and keep no state, so that the same functions run under a simulated clock. Prefill and decode are
chosen separately: decode may be chosen long after prefill.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pdkv.base.options import did_you_mean
from pdkv.errors import ConfigError
from pdkv.router.engines.candidate import EngineView


class Snapshot(NamedTuple):
    """The input of a policy."""

    engines: Sequence[EngineView]  # at least one
    turn: int  # rises by one per choice: spreads ties
    rng: random.Random
    match: Callable[[], Mapping[str, int]]  # cached tokens of this prompt by engine; computed on demand


Policy = Callable[[Snapshot], EngineView]


def rotate(engines: Sequence[EngineView], turn: int) -> list[EngineView]:
    """The engines from the `turn`-th on, so that ties go to another one each time."""
    start = turn % len(engines)
    return [*engines[start:], *engines[:start]]


def round_robin(snapshot: Snapshot) -> EngineView:
    """Each engine in turn."""
    return snapshot.engines[snapshot.turn % len(snapshot.engines)]


def uniform(snapshot: Snapshot) -> EngineView:
    """Any engine."""
    return snapshot.rng.choice(snapshot.engines)


def least_loaded(snapshot: Snapshot) -> EngineView:
    """The engine with the fewest tokens."""
    return min(rotate(snapshot.engines, snapshot.turn), key=lambda e: e.load)


def power_of_two(snapshot: Snapshot) -> EngineView:
    """The less loaded of two random engines (Mitzenmacher 2001): requests do not herd onto the least loaded one."""
    engines = snapshot.engines
    return min(snapshot.rng.sample(engines, min(2, len(engines))), key=lambda e: e.load)


def prefix_aware(snapshot: Snapshot) -> EngineView:
    """The engine with the fewest tokens, including those of this prompt that it has to compute or load.

    So a hit is worth as many queued tokens as it covers, and a prefix that all prompts share gathers them on one engine
    only while that costs nothing.
    """
    match = snapshot.match()
    return min(rotate(snapshot.engines, snapshot.turn), key=lambda e: e.load - match.get(e.name, 0))


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "random": uniform,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
}
"""Policies by their names on the command line."""

DEFAULT_POLICY = "prefix_aware"


def find_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: unknown; the message lists the known ones.
    """
    if name not in POLICIES:
        meant = did_you_mean(name, POLICIES)
        raise ConfigError(f"unknown policy {name!r}{meant}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
