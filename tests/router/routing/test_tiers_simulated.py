"""What it is worth to know what lies in a store: prompts that share their beginnings, on a virtual clock."""

import random
from collections import OrderedDict
from typing import NamedTuple

import pytest

from pdkv.router.engines.candidate import EngineView
from pdkv.router.engines.speeds import LOADED_SHARE, saved_tokens
from pdkv.router.routing.policies import Snapshot, prefix_aware

NUM_ENGINES, NUM_FAMILIES = 4, 16
SHARED, OWN = 2048, 256  # tokens of a prompt that its family shares, and others
FAMILIES_IN_A_CACHE = 6
NUM_PROMPTS = 5000


class Waits(NamedTuple):
    """Before prompts begin, in the time that an engine takes to compute a token."""

    mean: float
    p99: float


def simulate(*, knows_store: bool, utilization: float) -> Waits:
    """Prompts arrive at random at engines that load from a store what they lack; only the router's choice differs."""
    rng = random.Random(1)
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(NUM_ENGINES)]
    queues: list[list[tuple[float, int]]] = [[] for _ in range(NUM_ENGINES)]  # (end, tokens as the router counts them)
    free_at = [0.0] * NUM_ENGINES
    waits: list[float] = []
    cost_of_load = round(SHARED * (1 - LOADED_SHARE))
    rate = NUM_ENGINES * utilization / (OWN + 0.6 * cost_of_load)
    now = 0.0
    for turn in range(NUM_PROMPTS):
        now += rng.expovariate(rate)
        family = min(int(rng.paretovariate(0.8)) - 1, NUM_FAMILIES - 1)
        match = {}
        for engine, cache in enumerate(caches):
            cached = SHARED if family in cache else 0
            loaded = SHARED - cached if knows_store else 0
            match[str(engine)] = cached + saved_tokens(loaded, None, None)
            queues[engine] = [entry for entry in queues[engine] if entry[0] > now]
        views = [EngineView(str(e), sum(tokens for _, tokens in queue)) for e, queue in enumerate(queues)]
        chosen = int(prefix_aware(Snapshot(views, turn, rng, lambda match=match: match)).name)  # type: ignore[misc]
        cache = caches[chosen]
        cost = OWN + (0 if family in cache else cost_of_load)
        cache[family] = None
        cache.move_to_end(family)
        if len(cache) > FAMILIES_IN_A_CACHE:
            cache.popitem(last=False)
        start = max(now, free_at[chosen])
        free_at[chosen] = start + cost
        queues[chosen].append((free_at[chosen], SHARED + OWN - match[str(chosen)]))
        waits.append(start - now)
    return Waits(sum(waits) / NUM_PROMPTS, sorted(waits)[NUM_PROMPTS * 99 // 100])


@pytest.mark.parametrize(("utilization", "bound"), [(0.5, 0.25), (0.7, 0.45), (0.85, 0.7)])
def test_prompts_wait_less_where_the_router_knows_what_is_stored(utilization: float, bound: float) -> None:
    without = simulate(knows_store=False, utilization=utilization)
    knowing = simulate(knows_store=True, utilization=utilization)
    assert knowing.mean < bound * without.mean
    assert knowing.p99 <= without.p99
