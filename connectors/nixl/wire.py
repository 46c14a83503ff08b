"""Messages between ranks of the `nixl` connector, and their part of the engine's card."""

from typing import Literal

import msgspec

from pdkv.connectors.arena.arena import ArenaAddress
from pdkv.connectors.base import TransferKey
from pdkv.connectors.nixl.agent import MAX_MESSAGE_BYTES, Memory
from pdkv.connectors.nixl.doorbell import DoorbellAddress
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.connectors.transfer.units import UnitPart
from pdkv.wire.decoding import decode_total

BLOB_VERSION = 6

Mode = Literal["pull", "push"]

Path = Literal["arena", "ucx"]
"""How a pool is read: mapped, or by NIXL."""

PATHS: tuple[Path, ...] = ("arena", "ucx")


class RankBlob(msgspec.Struct, frozen=True, array_like=True):
    """How a rank's KV is reached; part of the engine's card. `host` is the boot id."""

    version: int
    mode: Mode
    agent: str  # engine/epoch/rank
    metadata: bytes  # NIXL's, of the agent and the regions below
    host: str
    doorbell: DoorbellAddress
    pool: Memory
    block_bytes: int
    slots: Memory  # gathered units, slot by slot, followed by their generations
    slot_bytes: int
    permits: Memory  # int64 words; see memory.py
    nonce: int  # the first of them
    paths: list[str]  # paths by which this rank may be read, perhaps some that this version does not know
    arena: ArenaAddress | None = None  # if the pool and the words are in one
    generations: Memory | None = None  # rank 0: one int64 per block
    digests: Memory | None = None  # of the rank's KV: rows of a stamp and a digest for each head


class _Wire(msgspec.Struct, frozen=True, array_like=True, tag_field="t"):
    """Base of the messages."""


# --- gathering: the reader asks, the source copies units into its slots, the reader reads those ---------------------


class Gather(_Wire, frozen=True, tag=1):
    """Gather units, in chunks of at most `chunk_bytes`, and report each. `offer`: only as long as that offer is not
    withdrawn.
    """

    request: int
    units: bytes  # packed (block_runs.py)
    head_start: int  # in the source's numbering of its heads
    head_stop: int
    layer_start: int
    layer_stop: int
    chunk_bytes: int
    offer: int = 0

    @property
    def part(self) -> UnitPart:
        """The part in the source's units."""
        return UnitPart(self.head_start, self.head_stop, self.layer_start, self.layer_stop)


class Gathered(_Wire, frozen=True, tag=2):
    """Chunk number `chunk` is in a slot, as long as the slot has this generation."""

    request: int
    chunk: int
    slot: int
    generation: int


class Refused(_Wire, frozen=True, tag=3):
    """No (further) chunk will come."""

    request: int
    code: str


class Freed(_Wire, frozen=True, tag=4):
    """The slot has been read."""

    request: int
    slot: int


class Dropped(_Wire, frozen=True, tag=5):
    """The request is over: its slots are no longer read."""

    request: int


class Reset(_Wire, frozen=True, tag=6):
    """Sent on a new connection, or after messages were lost: the sender is reading for these requests and no others."""

    open_requests: list[int]


# --- pushing ------------------------------------------------------------------------------------------------------


class Offer(_Wire, frozen=True, tag=15):
    """From the sender: these blocks can be read, as long as the word `permit` is `nonce`."""

    transfer_id: str
    attempt: int
    offer: int
    permit: int
    nonce: int
    whole: bool  # blocks, of all heads, cut the same way as the receiver's; else units
    blocks: bytes  # or units, packed
    head_start: int  # in the sender's numbering
    piece: PieceRange  # in the receiver's numbering

    @property
    def key(self) -> TransferKey:
        """The name of the transfer at the receiver."""
        return TransferKey(self.transfer_id, self.attempt)


class Taken(_Wire, frozen=True, tag=16):
    """From the receiver: it has read the offered blocks, or never will."""

    offer: int
    code: str = ""


class OfferDigests(_Wire, frozen=True, tag=17):
    """From the sender: digests of the offered blocks. Sent after the offer, so that it is read while they are made."""

    offer: int
    digests: bytes


Wire = Gather | Gathered | Refused | Freed | Dropped | Reset | Offer | Taken | OfferDigests

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Wire] = msgspec.msgpack.Decoder(Wire)
BLOBS = msgspec.msgpack.Decoder(RankBlob)


def encode(message: Wire) -> bytes:
    """Encode a message as msgpack.

    Raises:
        ValueError: it is longer than a message may be.
    """
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return data


def decode(data: bytes) -> Wire:
    """Decode a message. Raises MalformedMessage."""
    return decode_total(_decoder, data)


def encode_blob(blob: RankBlob) -> bytes:
    """Encode a rank's part of the engine's card."""
    return _encoder.encode(blob)
