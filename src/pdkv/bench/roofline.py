"""B_sat of a deployment: the requests in a decode step at which a step takes twice what it takes without any, since
what each request adds then equals what all of them share (reading the weights).
"""

from typing import Annotated

import msgspec
from msgspec import Meta

_Positive = Annotated[float, Meta(gt=0)]


class _Step(msgspec.Struct):
    fixed_s: _Positive
    request_s: _Positive


class _Engine(msgspec.Struct):
    decode_step: _Step | None = None


class _Topology(msgspec.Struct):
    engines: list[_Engine]


def saturation(topology: bytes) -> float | None:
    """The least B_sat of all engines, by the `decode_step` that pdkv's router says at /topology; None: not known."""
    try:
        engines = msgspec.json.decode(topology, type=_Topology).engines
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    steps = [engine.decode_step for engine in engines if engine.decode_step is not None]
    return min((step.fixed_s / step.request_s for step in steps), default=None)
