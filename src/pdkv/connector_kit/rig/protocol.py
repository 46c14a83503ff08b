"""Messages between the kit and the processes that host a connector, in msgpack.

A call names a method of the hosted object, whose annotations say how its arguments and its answer are decoded.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from inspect import signature
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, get_type_hints

import msgspec

from pdkv.connector_kit.rig.content import Piece
from pdkv.connectors.base import BlockHold, Cancel, SchedulerConnector, TransferKey, TransferResults

P = ParamSpec("P")
Result = TypeVar("Result")

# --- calls --------------------------------------------------------------------------------------------------------


class Asked(msgspec.Struct, frozen=True):
    """A call of a method of one engine's rank or, if `engine` is empty, of the host itself; answered once, by Answered
    or Raised.
    """

    engine: str
    method: str
    arguments: msgspec.Raw


class Answered(msgspec.Struct, frozen=True, tag=True):
    """The command was carried out; `value`: its answer, which the asking side decodes as the type that is expected."""

    value: msgspec.Raw


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The command raised an error. `kind` is the type's name; `incompatible` an IncompatiblePeers, `config` another
    ConfigError.
    """

    kind: str
    message: str
    trace: str
    incompatible: bool
    config: bool


class Woken(msgspec.Struct, frozen=True, tag=True):
    """The connector has called notify; no answer is expected."""

    engine: str


AnyAnswer = Answered | Raised | Woken

Observes = tuple[int, int, bool, int, int]
"""An `Observed`, with the numbers of its flags."""


class Built(msgspec.Struct, frozen=True):
    """The connector's description of itself."""

    observes: Observes
    blob: bytes
    error_codes: list[str]  # of all subclasses of TransferError known there
    has_digests: bool = False  # of the KV that it hands off


# --- arguments and answers ----------------------------------------------------------------------------------------


class TokenRange(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a text, and their block tables, one per KV group."""

    text: list[Piece]
    start: int
    stop: int
    block_tables: list[list[int]]


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one rank, or a part of it: `begin` (cancels, start_load_kv), layers, `end` (the rest)."""

    step_id: int
    meta: bytes | None = None  # None: this rank's process has planned it
    cancels: list[Cancel] = []
    writes: list[TokenRange] = []
    garbage: list[int] = []  # blocks of other requests, written with the first layer
    begin: bool = True
    layers: tuple[int, int] | None = None  # None: all
    end: bool = True


class BareSpec(msgspec.Struct, frozen=True):
    """One side of a bare transport; without an address, the side that has the data."""

    side: str  # the class and its transport: "module:Class"
    transport: str
    num_bytes: int  # moved at a time
    piece_bytes: int
    value_bytes: int  # size of each value, if the transport has values
    region_bytes: int  # at least this much memory on each side, used in turns
    options: dict[str, str]
    address: bytes | None = None


class TableEntry(NamedTuple):
    """A block's new content in the block table; None: it has none any more."""

    block_id: int
    keys: list[bytes] | None


class Planned(NamedTuple):
    """Metadata; the object itself stays with the rank that made it."""

    holds: list[BlockHold]
    meta: bytes | None


class Executed(msgspec.Struct, frozen=True):
    """The results of a step; `wrong` says what is wrong with the content of finished loads."""

    results: TransferResults
    wrong: list[tuple[TransferKey, str]]
    began: float = 0.0  # by the monotonic clock, of timed ranks
    ended: float = 0.0


class CallRecord(NamedTuple):
    """One connector call on the step thread."""

    name: str
    blocked_s: float  # neither running nor waiting for a processor
    cpu_s: float
    entered: list[str]  # calls into a transport, and waits


class Spoilt(NamedTuple):
    """The number of damaged digests, and which targets were damaged."""

    num_digests: int
    targets: list[int]


class Usage(NamedTuple):
    """Open descriptors by kind, names of threads, and resident bytes that belong to no file."""

    descriptors: list[str]
    threads: list[str]
    resident_bytes: int


def encode_call(engine: str, method: Callable[Concatenate[Any, P], object], *args: P.args, **kwargs: P.kwargs) -> bytes:
    """A call of `method`; defaults are filled in here."""
    bound = _signature(method).bind(None, *args, **kwargs)
    bound.apply_defaults()
    return encode(Asked(engine, method.__name__, msgspec.Raw(encode(bound.args[1:]))))


def carry_out(target: Any, asked: Asked) -> Answered:
    """Call the method of the hosted object or, if it has none, of its scheduler side."""
    method = getattr(type(target), asked.method, None) or getattr(SchedulerConnector, asked.method)
    arguments = msgspec.msgpack.decode(asked.arguments, type=_types(method)[0])
    own = getattr(target, asked.method, None)
    answer = own(*arguments) if own else target.ask_scheduler(asked.method, *arguments)
    return Answered(msgspec.Raw(encode(answer)))


def decode_result(method: Callable[..., Result], answered: Answered) -> Result:
    """What the method has returned in the other process."""
    result: Result = msgspec.msgpack.decode(answered.value, type=_types(method)[1])
    return result


_signature = cache(signature)


@cache
def _types(method: Callable[..., object]) -> tuple[Any, Any]:
    """The types of a method's arguments, as those of a tuple, and the type of its answer."""
    hints = get_type_hints(method)
    answer = hints.pop("return")
    return tuple[tuple(hints.values())], answer  # type: ignore[misc]


def _plain(collection: Collection[Any]) -> object:
    """The content of a map or sequence of whatever type the engine or the connector uses."""
    return dict(collection) if isinstance(collection, Mapping) else list(collection)


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_asked = msgspec.msgpack.Decoder(Asked).decode
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
