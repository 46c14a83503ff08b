"""Addresses of engines, which the launcher sends to the router at the start and later."""

from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "any"]


class EngineAddress(msgspec.Struct, frozen=True):
    """Where the router finds an engine."""

    name: str  # unique, such as "prefill-0"
    role: Role
    endpoint: str  # ipc:// or tcp://
    refusal: Path | None = None  # where a launcher writes why it keeps the engine out (RefusalNote)
