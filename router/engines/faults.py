"""One table of who is at fault when a request fails; scores, books and metrics read it alike (docs/failures.md)."""

from collections.abc import Iterator
from typing import Literal

from pdkv.errors import (
    EngineUnavailable,
    GrammarGivenUp,
    InvalidRequest,
    KillsEngines,
    PdkvError,
    RequestAborted,
    RequestTimeout,
    ServerBusy,
    TransferError,
)

Fault = Literal["client", "poison", "engine", "pair", "capacity", "deadline"]


def _codes(kind: type[PdkvError]) -> Iterator[str]:
    yield kind.code
    for special in kind.__subclasses__():
        yield from _codes(special)


_FAULTS: dict[str, Fault] = {
    InvalidRequest.code: "client",
    GrammarGivenUp.code: "client",
    RequestAborted.code: "client",
    KillsEngines.code: "poison",
    ServerBusy.code: "capacity",
    EngineUnavailable.code: "capacity",
    RequestTimeout.code: "deadline",
    **dict.fromkeys(_codes(TransferError), "pair"),  # of a KV load, which the decode engine does not replace
}


def fault_of(error: PdkvError) -> Fault:
    """The party at fault, as far as the code tells: the engine, unless another one is known to be."""
    return _FAULTS.get(error.code, "engine")
