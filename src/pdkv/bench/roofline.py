"""B_sat of a deployment: the requests in a decode step at which a step takes twice what it takes without any, since
what each request adds then equals what all of them share (reading the weights).
"""

from collections.abc import Mapping
from typing import Any

UNKNOWN = "unknown"


def saturation(topology: Mapping[str, Any]) -> dict[str, float]:
    """B_sat by engine, from the `decode_step` that pdkv's router has measured; engines for which it is not known are
    left out. `topology`: what the server says at /topology; any JSON object.
    """
    found = {}
    engines = topology.get("engines")
    for engine in engines if isinstance(engines, list) else ():
        step = engine.get("decode_step") if isinstance(engine, dict) else None
        if isinstance(step, dict):
            fixed_s, request_s = step.get("fixed_s"), step.get("request_s")
            if isinstance(fixed_s, int | float) and isinstance(request_s, int | float) and min(fixed_s, request_s) > 0:
                found[str(engine.get("name"))] = fixed_s / request_s
    return found


def shown(found: Mapping[str, float]) -> str:
    """The range over engines, for people."""
    if not found:
        return UNKNOWN
    least, most = min(found.values()), max(found.values())
    return f"{least:.0f}" if round(least) == round(most) else f"{least:.0f}-{most:.0f}"
