"""Routing policies: functions from a snapshot of one side's candidates to the chosen engine.

They read no clock and keep no state, so that the same functions run under a simulated clock. Prefill and decode are
chosen separately: decode may be chosen long after prefill. Others' are found by entry point (docs/policies.md).
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from pdkv.base.registry import Registry
from pdkv.router.engines.candidate import EngineView, Side


class Snapshot(NamedTuple):
    """The input of a policy."""

    engines: Sequence[EngineView]  # at least one
    turn: int  # rises by one per choice: spreads ties
    rng: random.Random
    match: Callable[[], Mapping[str, int]]  # cached tokens of this prompt by engine; computed on demand
    side: Side = "prefill"  # of an aggregated engine, which is both: prefill
    num_tokens: int = 0  # of the prompt
    # Seconds to the first token that each engine would take (decode: for each further one), as far as measured.
    predict: Callable[[], Mapping[str, float]] = dict


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
    """The engine with the fewest tokens; those that wait for a slow engine count more."""
    return min(rotate(snapshot.engines, snapshot.turn), key=lambda e: e.cost)


def power_of_two(snapshot: Snapshot) -> EngineView:
    """The less loaded of two random engines (Mitzenmacher 2001): requests do not herd onto the least loaded one."""
    engines = snapshot.engines
    return min(snapshot.rng.sample(engines, min(2, len(engines))), key=lambda e: e.cost)


def prefix_aware(snapshot: Snapshot) -> EngineView:
    """The engine with the fewest tokens, including those of this prompt that it has to compute or load. Each of these
    counts twice: it drops another one from the engine's cache, which will be computed again.

    So a hit is worth as many queued tokens as it covers, and a prefix that all prompts share gathers them on one engine
    only while that costs nothing.
    """
    match = snapshot.match()
    return min(rotate(snapshot.engines, snapshot.turn), key=lambda e: e.cost - 2 * match.get(e.name, 0))


MOST_QUEUED_S = 10.0
"""Seconds of work that an objective for the first token may gather on one engine, however late it lies."""


def cheapest_within(snapshot: Snapshot, slo_s: float) -> EngineView | None:
    """The engine that has fewest tokens of the prompt to compute, or to load, of those predicted to meet an objective;
    if none is, the soonest. None: not all of them have been measured.
    """
    seconds = snapshot.predict()
    if len(seconds) < len(snapshot.engines):
        return None
    engines, most_s = rotate(snapshot.engines, snapshot.turn), min(slo_s, MOST_QUEUED_S)
    meeting = [engine for engine in engines if seconds[engine.name] <= most_s]
    if not meeting:
        return min(engines, key=lambda e: seconds[e.name])
    match = snapshot.match()
    return min(meeting, key=lambda e: (-match.get(e.name, 0), e.load))


BY_LOAD: Collection[Policy] = (least_loaded, prefix_aware)
"""Policies that need not see all engines of a large fleet: only the least loaded, and those with most of a prompt."""

POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "random": uniform,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "prefix_aware": prefix_aware,
}
"""Policies by their names on the command line."""

DEFAULT_POLICY = "prefix_aware"


_REGISTRY: Registry[Policy] = Registry(
    "policy", "pdkv.policies", {name: f"{__name__}:{policy.__name__}" for name, policy in POLICIES.items()}, base=""
)


def find_policy(name: str) -> Policy:
    """The policy of that name: shipped, an entry point in the group "pdkv.policies", or "module:function".

    Raises:
        ConfigError: unknown; the message lists the known ones. Or it cannot be imported or called.
    """
    policy: Policy = POLICIES.get(name) or _REGISTRY.load_function(name)
    return policy
