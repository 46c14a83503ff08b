"""Messages from rank 0 of an engine to the other ranks, and their answers: tagged structs, msgpack, a decoder
each way.
"""

import msgspec

from pdkv.connectors.base import KVConnectorMetadata, Stats, TransferKey, TransferOutcome, TransferResults
from pdkv.engine.plan import StepFailure, StepOutput, StepPlan
from pdkv.errors import ConfigError
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard
from pdkv.wire.reports import ConnectorStats
from pdkv.wire.types import RequestKey

# --- rank 0 -> the others, through the ring -----------------------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag=True):
    """All ranks have reported how many blocks fit: take this many, and warm up. Answered by Attached."""

    num_blocks: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Run a step. Answered by StepDone."""

    plan: StepPlan  # without kv_meta
    kv_meta: bytes | None  # of the connector's own type, which is called
    kv_meta_type: str


class MasksTaken(msgspec.Struct, frozen=True, tag=True):
    """In the middle of a step in which a request with a grammar draws: the masks, and the requests left out."""

    rows: list[int]
    bits: bytes  # (len(rows), words) int32
    late: list[int]  # as in `StepMasks`


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Between two steps: which transfers have ended? Answered by Collected."""

    with_stats: bool = False  # even if nothing has ended


class PeersChanged(msgspec.Struct, frozen=True, tag=True):
    """Peer changes for the connector's worker side."""

    added: list[EngineCard]
    removed: list[EngineCard]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The engine shuts down."""


Order = Attach | Step | MasksTaken | Collect | PeersChanged | Stop


# --- the others -> rank 0, each on its channel --------------------------------------------------------------------


class Sized(msgspec.Struct, frozen=True, tag=True):
    """The weights are loaded; this many blocks fit."""

    num_blocks: int
    model: str  # identity of the loaded weights


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Ready for steps; what peers need to reach this rank's KV."""

    pid: int
    blob: bytes


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The end of a step on this rank; `transfers`: finished sending, failed sending, finished receiving, failed
    receiving.
    """

    step_id: int
    transfers: list[list[tuple[TransferKey, TransferOutcome]]]
    failed: list[tuple[RequestKey, StepFailure]] = []  # findings in this rank's part of heads and KV
    connector_stats: dict[str, ConnectorStats] | None = None  # None: as in the step before
    digest: int = 0  # of the tokens that this rank drew


class Collected(msgspec.Struct, frozen=True, tag=True):
    """Transfers that have ended on this rank; fields as in StepDone."""

    transfers: list[list[tuple[TransferKey, TransferOutcome]]]
    connector_stats: dict[str, ConnectorStats] | None = None
    has_sends: bool = False  # a step under way has found others, which its StepDone will have


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The last message of a rank that an error ends."""

    reason: str


Answer = Sized | Attached | StepDone | Collected | Broken

_encoder = msgspec.msgpack.Encoder()
_order_decoder: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Order | Answer) -> bytes:
    """Encode as msgpack."""
    return _encoder.encode(message)


def decode_order(data: bytes | bytearray) -> Order:
    """Raises MalformedMessage."""
    return decode_total(_order_decoder, data)


def decode_answer(data: bytes | bytearray) -> Answer:
    """Raises MalformedMessage."""
    return decode_total(_answer_decoder, data)


def encode_step(plan: StepPlan) -> bytes:
    """A step, encoded for the other ranks."""
    meta = None if plan.kv_meta is None else _encoder.encode(plan.kv_meta)
    plain = plan if meta is None else msgspec.structs.replace(plan, kv_meta=None)
    return _encoder.encode(Step(plain, meta, type(plan.kv_meta).__name__))


def plan_of(step: Step, metadata_type: type[KVConnectorMetadata]) -> StepPlan:
    """The plan with its metadata, decoded as the connector's own type.

    Raises:
        ConfigError: the connector's scheduler side makes another type, whose fields would be lost.
    """
    plan = step.plan
    if step.kv_meta is None:
        return plan
    if step.kv_meta_type != metadata_type.__name__:
        raise ConfigError(
            f"the connector's metadata_type is {metadata_type.__name__}, its scheduler side made {step.kv_meta_type}"
        )
    meta = msgspec.msgpack.decode(step.kv_meta, type=metadata_type)
    return msgspec.structs.replace(plan, kv_meta=meta)


def step_done(output: StepOutput) -> StepDone:
    """The answer to a step."""
    ended = collected(output.transfers, output.connector_stats)
    failed = list(output.failed.items())
    return StepDone(output.step_id, ended.transfers, failed, ended.connector_stats, output.digest)


def collected(transfers: TransferResults, stats: Stats | None, *, has_sends: bool = False) -> Collected:
    """The answer between two steps."""
    maps = [list(outcomes.items()) for outcomes in transfers] if transfers else []
    return Collected(maps, None if stats is None else dict(stats), has_sends)


def transfers_of(done: StepDone | Collected) -> TransferResults:
    """The results in an answer."""
    return TransferResults(*map(dict, done.transfers or ([], [], [], [])))
