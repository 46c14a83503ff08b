"""What ranks of the `nixl` connector tell each other: their part of the engine's card, and messages."""

from typing import Literal

import msgspec

from pdkv.connectors.arena.memory import ArenaAddress
from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.agent import MAX_MESSAGE_BYTES, Memory
from pdkv.connectors.nixl.doorbell import DoorbellAddress
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.connectors.transfer.units import UnitPart
from pdkv.wire.decoding import decode_total

BLOB_VERSION = 6

Mode = Literal["pull", "push"]

Path = Literal["arena", "cma", "ucx"]
"""How a pool is read: mapped, copied from process to process, or by NIXL."""

PATHS: tuple[Path, ...] = ("arena", "cma", "ucx")


class RankBlob(msgspec.Struct, frozen=True, array_like=True):
    """How a rank's KV is reached; travels in the engine's card. `host` is the boot's id."""

    version: int
    mode: Mode
    agent: str  # engine/epoch/rank
    metadata: bytes  # NIXL's, of the agent and the regions below
    host: str
    doorbell: DoorbellAddress
    pool: Memory
    block_bytes: int
    slots: Memory  # what is gathered lies here, slot by slot; then their generations
    slot_bytes: int
    permits: Memory  # int64 words; see memory.py
    nonce: int  # the first of them
    paths: list[Path]  # by which this rank may be read
    arena: ArenaAddress | None = None  # where the pool and the words lie in one
    generations: Memory | None = None  # rank 0: one int64 per block
    digests: Memory | None = None  # of the rank's KV: rows of a stamp and a digest for each head


class _Wire(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of the messages."""


# --- gathering: the reader asks, the source copies units into its slots, the reader reads those ---------------------


class Gather(_Wire, frozen=True, tag=1):
    """Gather units, in chunks of at most `chunk_bytes`, and tell of each. `offer`: only while that offer stands."""

    request: int
    units: bytes  # packed (block_runs.py)
    head_start: int  # as the source counts its heads
    head_stop: int
    layer_start: int
    layer_stop: int
    chunk_bytes: int
    offer: int = 0

    @property
    def part(self) -> UnitPart:
        """Of the source's units."""
        return UnitPart(self.head_start, self.head_stop, self.layer_start, self.layer_stop)


class Gathered(_Wire, frozen=True, tag=2):
    """Chunk number `chunk` lies in a slot, as long as that has this generation."""

    request: int
    chunk: int
    slot: int
    generation: int


class Refused(_Wire, frozen=True, tag=3):
    """No (further) chunk comes."""

    request: int
    code: str


class Freed(_Wire, frozen=True, tag=4):
    """The slot has been read."""

    request: int
    slot: int


class Dropped(_Wire, frozen=True, tag=5):
    """The request is over: nothing of its slots is read any more."""

    request: int


class Reset(_Wire, frozen=True, tag=6):
    """When a connection is new, or messages got lost: the sender reads for these requests and no others."""

    open_requests: list[int]


# --- pushing ------------------------------------------------------------------------------------------------------


class Offer(_Wire, frozen=True, tag=15):
    """Sender: this can be read here, as long as the word `permit` is `nonce`."""

    transfer_id: str
    attempt: int
    offer: int
    permit: int
    nonce: int
    whole: bool  # blocks, of all heads, that are cut as the receiver's; else units
    blocks: bytes  # or units, packed
    head_start: int  # as the sender counts
    piece: PieceRange  # as the receiver counts

    @property
    def key(self) -> TransferKey:
        """The name of the transfer at the receiver."""
        return TransferKey(self.transfer_id, self.attempt)


class Taken(_Wire, frozen=True, tag=16):
    """Receiver: I have what was offered, or never will."""

    offer: int
    code: str = ""


class OfferDigests(_Wire, frozen=True, tag=17):
    """Sender: what was offered has these digests. Behind the offer, so that it is read while they are made."""

    offer: int
    digests: bytes


Wire = Gather | Gathered | Refused | Freed | Dropped | Reset | Offer | Taken | OfferDigests

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Wire] = msgspec.msgpack.Decoder(Wire)
BLOBS = msgspec.msgpack.Decoder(RankBlob)


def encode(message: Wire) -> bytes:
    """Msgpack of a message.

    Raises:
        ValueError: it is longer than a message may be.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def decode(data: bytes) -> Wire:
    """Raises MalformedMessage for what is no message of ours."""
    return decode_total(_decoder, data)


def encode_blob(blob: RankBlob) -> bytes:
    """A rank's part of the engine's card."""
    return _encoder.encode(blob)
