"""A routing policy of its own: the engine that would be done soonest, in seconds and not in tokens.

Tokens are a fair measure of equal engines. In a fleet of old and new processors, the slower ones should have fewer.
"""

from pdkv.router.engines.candidate import EngineView
from pdkv.router.routing.policies import Snapshot

SAME_S = 0.005
"""Seconds within which engines count as equally fast."""


def fastest(snapshot: Snapshot) -> EngineView:
    """The least loaded of the engines that would be done soonest; engines that are not measured yet come first."""
    seconds = snapshot.predict()
    unknown = [engine for engine in snapshot.engines if engine.name not in seconds]
    if unknown:
        return unknown[snapshot.turn % len(unknown)]
    best = min(seconds.values())
    equal = [engine for engine in snapshot.engines if seconds[engine.name] <= best + SAME_S]
    return min(equal, key=lambda engine: engine.load)
