"""Messages between the kit and the processes that host a connector: msgpack, one decoder on each side."""

from typing import NamedTuple

import msgspec

from pdkv.connector_kit.rig.content import Piece
from pdkv.connector_kit.rig.damage import How
from pdkv.connectors.base import (
    Cancel,
    ConnectorConfig,
    RequestView,
    SchedulerView,
    TransferKey,
    TransferResults,
)
from pdkv.wire.kv import EngineCard


class Command(msgspec.Struct, frozen=True, tag=True):
    """Base of what the kit asks of a host; each is answered once, by Answered or Raised."""


class TokenRange(msgspec.Struct, frozen=True):
    """Tokens [start, stop) of a text, and their block tables, one per KV group."""

    text: list[Piece]
    start: int
    stop: int
    block_tables: list[list[int]]


# --- life of an engine --------------------------------------------------------------------------------------------


class Build(Command, frozen=True):
    """Make a connector and its sides for one rank, and a pool."""

    config: ConnectorConfig
    rank: str = "pdkv.connector_kit.rig.rank:HostedRank"  # the class of the rank: "module:Class"


class Close(Command, frozen=True):
    """Shut both sides and the connector down, twice: shutdown is idempotent."""


class Drop(Command, frozen=True):
    """Forget an engine without a word, as far as a living process can (`one_process` only)."""


class UpdatePeers(Command, frozen=True):
    """Tell both sides the current peers."""

    cards: list[EngineCard]
    added: list[EngineCard]
    removed: list[EngineCard]


# --- scheduler side -----------------------------------------------------------------------------------------------


class Match(Command, frozen=True):
    """get_num_new_matched_tokens."""

    request: RequestView
    num_computed: int


class Allocate(Command, frozen=True):
    """update_state_after_alloc."""

    request: RequestView
    block_tables: list[list[int]]
    num_external: int


class Plan(Command, frozen=True):
    """build_connector_meta. `encode`: other ranks will need it."""

    view: SchedulerView
    encode: bool


class FinishRequest(Command, frozen=True):
    """request_finished."""

    request: RequestView
    block_tables: list[list[int]]


class Settle(Command, frozen=True):
    """resolve_results, then update_connector_output with what it said; answered by TransferResults."""

    results: TransferResults


class IsPending(Command, frozen=True):
    """has_pending_work."""


class TakeEvents(Command, frozen=True):
    """take_events."""


class Reuse(Command, frozen=True):
    """The block table: end the content of these blocks now."""

    block_ids: list[int]


class Publish(Command, frozen=True):
    """The block table: these blocks are full, with these keys per block."""

    blocks: list[tuple[int, list[bytes]]]


# --- worker side --------------------------------------------------------------------------------------------------


class Execute(Command, frozen=True, kw_only=True):
    """One step of one rank, or a part of it: `begin` (cancels, start_load_kv), layers, `end` (the rest)."""

    step_id: int
    meta: bytes | None = None  # None: this rank's process has planned it
    cancels: list[Cancel] = []
    writes: list[TokenRange] = []
    garbage: list[int] = []  # blocks of other requests, written with the first layer
    begin: bool = True
    layers: tuple[int, int] | None = None  # None: all
    end: bool = True


class Expect(Command, frozen=True):
    """A load begins: these blocks may be written from outside until its end is reported, and `range` must be right
    then.
    """

    key: TransferKey
    block_ids: list[int]
    range: TokenRange | None


# --- inspection -----------------------------------------------------------------------------------------------------


class Fill(Command, frozen=True):
    """Write tokens, or (text empty) garbage, into blocks outside of any step."""

    range: TokenRange


class Spoil(Command, frozen=True):
    """After the next digest made here, change the digested content (damage.py)."""

    how: How
    seed: int = 0
    targets: list[list[int]] = []


class Unspoil(Command, frozen=True):
    """Restore the blocks; answered by Spoilt."""


class ForeignWrites(Command, frozen=True):
    """Report blocks that were written from outside although no load owned them."""


class Written(Command, frozen=True):
    """Report the share of a load that has arrived, by one word of each row."""

    block_ids: list[int]


class TakeCalls(Command, frozen=True):
    """Records of the connector calls since the last TakeCalls."""


class Instrument(Command, frozen=True):
    """Whether strict calls are traced, which costs additional CPU time."""

    on: bool


class CopyCost(Command, frozen=True):
    """CPU seconds that a plain copy of these blocks takes on one thread."""

    block_ids: list[int]


class GetUsage(Command, frozen=True):
    """Ask for the descriptors, threads and memory of the process."""


# --- benchmarks ---------------------------------------------------------------------------------------------------


class Await(Command, frozen=True):
    """Collect results until all of these transfers have ended on this rank; no step runs. Answered by Executed."""

    keys: list[TransferKey]
    timeout_s: float


class Digest(Command, frozen=True):
    """Digest the content at the tokens' places, for comparisons between engines."""

    range: TokenRange


class Forward(Command, frozen=True):
    """Let each layer of a step that writes tokens compute for about this long; always the same work."""

    layer_s: float


class Throttle(Command, frozen=True):
    """Limit the transport to this many bytes a second; 0: unlimited."""

    bytes_per_s: float


class OpenBare(Command, frozen=True):
    """Open one side of a bare transport; without an address, the side that has the data."""

    side: str  # the class and its transport: "module:Class"
    transport: str
    num_bytes: int  # moved at a time
    piece_bytes: int
    value_bytes: int  # size of each value, if the transport has values
    region_bytes: int  # at least this much memory on each side, used in turns
    options: dict[str, str]
    address: bytes | None = None


class MoveBare(Command, frozen=True):
    """Move once, in one piece or in pieces. Both sides are told; the receiving one reports the duration."""

    in_pieces: bool
    timeout_s: float


class Exit(Command, frozen=True):
    """End the process."""


AnyCommand = (
    Build | Close | Drop | UpdatePeers | Match | Allocate | Plan | FinishRequest | Settle | IsPending | TakeEvents
    | Reuse | Publish | Execute | Expect | Fill | ForeignWrites | TakeCalls | Instrument | CopyCost | GetUsage | Await
    | Digest | Forward | Throttle | OpenBare | MoveBare | Exit | Spoil | Unspoil | Written
)  # fmt: skip


class Asked(msgspec.Struct, frozen=True):
    """A command for one engine of a host."""

    engine: str
    command: AnyCommand


# --- answers ------------------------------------------------------------------------------------------------------

Done: type[None] = type(None)
"""What is decoded where a command has nothing to say."""


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


class Built(msgspec.Struct, frozen=True):
    """The connector's description of itself."""

    observes_scheduled: bool
    observes_confirmed: bool
    blob: bytes
    error_codes: list[str]  # of all subclasses of TransferError known there
    has_digests: bool = False  # of the KV that it hands off


class Ticket(NamedTuple):
    """The result of update_state_after_alloc."""

    ticket: bytes | None


class Planned(NamedTuple):
    """Metadata; the object itself stays with the rank that made it."""

    holds: list[tuple[TransferKey, list[int], TransferKey]]
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


def as_dicts(results: TransferResults) -> TransferResults:
    """The same results with maps that can be sent, whatever types the connector uses."""
    return TransferResults(*map(dict, results))


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Asked).decode
decode_answer = msgspec.msgpack.Decoder(AnyAnswer).decode
