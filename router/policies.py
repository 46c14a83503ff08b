"""Routing policies: functions from a snapshot to a (prefill, decode) pair of engine names.

They read no clock and keep no state, so that the same functions run under a simulated clock.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pdkv.errors import ConfigError
from pdkv.options import did_you_mean

LOAD_GUARD = 8
"""A hit on the whole prompt may cost this much more load (two waiting requests) than the least loaded engine has.

A hit on a part of it may cost that part of it: what all prompts share must not gather all requests on one engine.
"""


class EngineView(NamedTuple):
    """One candidate."""

    name: str
    load: int  # waiting * 4 + running
    aggregated: bool = False  # it runs prompts and decodes them itself


class Snapshot(NamedTuple):
    """What a policy may look at. Both sequences have at least one candidate."""

    prefill: Sequence[EngineView]
    decode: Sequence[EngineView]
    num_prompt_tokens: int
    turn: int  # rises by one per request: spreads ties
    rng: random.Random
    match: Callable[[], Mapping[str, int]]  # cached tokens of this prompt by engine; computed on demand
    marked: frozenset[tuple[str, str]] = frozenset()  # pairs between which a KV transfer failed lately


Policy = Callable[[Snapshot], tuple[str, str]]
Choice = Callable[[Sequence[EngineView]], EngineView]


def pair(snapshot: Snapshot, choose_prefill: Choice, choose_decode: Choice) -> tuple[str, str]:
    """Choose both sides; an aggregated engine is its own decode side, and marked pairs are avoided."""
    prefill = choose_prefill(snapshot.prefill)
    if prefill.aggregated:
        return prefill.name, prefill.name
    unmarked = [d for d in snapshot.decode if (prefill.name, d.name) not in snapshot.marked]
    return prefill.name, choose_decode(unmarked or snapshot.decode).name


def rotate(engines: Sequence[EngineView], turn: int) -> list[EngineView]:
    """The engines from the `turn`-th on, so that the first of equals is another one each time."""
    start = turn % len(engines)
    return [*engines[start:], *engines[:start]]


def round_robin(snapshot: Snapshot) -> tuple[str, str]:
    """Each engine in turn."""

    def choose(engines: Sequence[EngineView]) -> EngineView:
        return engines[snapshot.turn % len(engines)]

    return pair(snapshot, choose, choose)


def uniform(snapshot: Snapshot) -> tuple[str, str]:
    """Any engine."""
    return pair(snapshot, snapshot.rng.choice, snapshot.rng.choice)


def least_loaded(snapshot: Snapshot) -> tuple[str, str]:
    """The engine with the lowest waiting * 4 + running."""

    def choose(engines: Sequence[EngineView]) -> EngineView:
        return min(rotate(engines, snapshot.turn), key=lambda e: e.load)

    return pair(snapshot, choose, choose)


def power_of_two(snapshot: Snapshot) -> tuple[str, str]:
    """The less loaded of two random engines (Mitzenmacher 2001): no herd on the one that was least loaded."""

    def choose(engines: Sequence[EngineView]) -> EngineView:
        return min(snapshot.rng.sample(engines, min(2, len(engines))), key=lambda e: e.load)

    return pair(snapshot, choose, choose)


def prefix_aware(snapshot: Snapshot) -> tuple[str, str]:
    """Prefill: the longest cached prefix that is worth its engine's load; a miss goes to the least loaded.

    Decode: the least loaded, and of equals the one that has most of the prompt already.
    """
    match = snapshot.match()

    def choose_prefill(engines: Sequence[EngineView]) -> EngineView:
        least, guard = min(e.load for e in engines), LOAD_GUARD / snapshot.num_prompt_tokens
        candidates = [e for e in rotate(engines, snapshot.turn) if e.load - least <= guard * match.get(e.name, 0)]
        return max(candidates, key=lambda e: (match.get(e.name, 0), -e.load))

    def choose_decode(engines: Sequence[EngineView]) -> EngineView:
        return min(rotate(engines, snapshot.turn), key=lambda e: (e.load, -match.get(e.name, 0)))

    return pair(snapshot, choose_prefill, choose_decode)


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "random": uniform,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
}
"""Policies by the names that the command line knows."""

DEFAULT_POLICY = "prefix_aware"


def find_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none; the message lists the known ones.
    """
    if name not in POLICIES:
        meant = did_you_mean(name, POLICIES)
        raise ConfigError(f"unknown policy {name!r}{meant}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
