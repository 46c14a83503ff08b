"""Snapshots and JSON-ready descriptions of a fleet, for metrics and operators."""

from collections.abc import Mapping
from typing import Any

from pdkv.router.engines.card_summary import describe_card
from pdkv.router.engines.fleet import EngineState, Fleet
from pdkv.router.engines.health import HealthSnapshot
from pdkv.router.generations.probes import Prober


def snapshot_health(fleet: Fleet, prober: Prober, num_moved: int, now: float) -> HealthSnapshot:
    """The router's current judgement of its engines."""
    return HealthSnapshot(
        [name for name, engine in fleet.engines.items() if engine.breaker.state(now) != "closed"],
        num_pairs_open=len(fleet.pairs.states(now)),
        probes_ok=prober.num_ok,
        probes_failed=prober.num_failed,
        num_moved=num_moved,
    )


def describe_engine(engine: EngineState, num_requests: int, now: float) -> dict[str, Any]:
    """One engine, JSON-ready: `EngineState.describe` and `describe_card`."""
    return engine.describe(now, num_requests) | describe_card(engine.card, engine.load)


def describe_fleet(fleet: Fleet, num_requests: Mapping[str, int], now: float) -> dict[str, Any]:
    """The fleet, JSON-ready: {"engines": [each], "pairs": [those whose breaker is not closed]}. `num_requests`: of each
    engine.
    """
    states = fleet.pairs.states(now)
    return {
        "engines": [describe_engine(e, num_requests.get(e.name, 0), now) for e in fleet.engines.values()],
        "pairs": [{"prefill": p, "decode": d, "breaker": state} for (p, d), state in states.items()],
    }
