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
        num_bad_pairs=len(fleet.pairs),
        probes_ok=prober.num_ok,
        probes_failed=prober.num_failed,
        num_moved=num_moved,
    )


def describe_engine(engine: EngineState, num_requests: int, now: float) -> dict[str, Any]:
    """One engine, JSON-ready: `EngineState.describe` and `describe_card`."""
    return engine.describe(now, num_requests) | describe_card(engine.card, engine.load)


def describe_fleet(fleet: Fleet, num_requests: Mapping[str, int], now: float) -> dict[str, Any]:
    """The fleet, JSON-ready: {"engines": [each], "pairs": [those whose KV loads fail]}. `num_requests`: of each
    engine.
    """
    return {
        "engines": [
            describe_engine(e, num_requests.get(e.name, 0), now) | _decode_step(fleet, e.name)
            for e in fleet.engines.values()
        ],
        "pairs": [{"prefill": prefill, "decode": decode} for prefill, decode in fleet.pairs],
    }


def _decode_step(fleet: Fleet, name: str) -> dict[str, Any]:
    """The time between two tokens, as a line over the requests that decode together; measured on recent requests."""
    fixed_s, request_s = fleet.speeds.step_line(name)
    return {"decode_step": {"fixed_s": fixed_s, "request_s": request_s}} if fixed_s and request_s else {}
