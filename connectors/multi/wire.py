"""The wrappers of `multi` around its children's data: keys, hand-offs, tickets, handshakes and a step's orders."""

from collections.abc import Sequence

import msgspec

from pdkv.connectors.base import KVConnectorMetadata, TransferKey
from pdkv.connectors.plan import ConnectorPlan
from pdkv.errors import MalformedMessage
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard
from pdkv.wire.types import MAX_BLOB_BYTES


def part_name(place: int, child: ConnectorPlan) -> str:
    """The name of a child among the separately counted parts."""
    return f"{place}-{child.name}"


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """A child's ticket with the child's number."""

    child: int
    ticket: bytes


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One child's part of a rank's handshake."""

    name: str
    blob: bytes


class MultiMetadata(KVConnectorMetadata, kw_only=True):
    """One step's orders to every child's worker side."""

    parts: list[msgspec.Raw] = msgspec.field(default_factory=list)
    """One per child. In the scheduler's own process each is the child's metadata itself, not encoded."""

    cancels: list[tuple[int, TransferKey]] = msgspec.field(default_factory=list)
    """(child, transfer) of loads that begin in this step and are cancelled in it."""


_encoder = msgspec.msgpack.Encoder()
_handoffs = msgspec.msgpack.Decoder(list[bytes | None])
_tickets = msgspec.msgpack.Decoder(Ticket)
_handshakes = msgspec.msgpack.Decoder(list[Part])


# --- keys between the worker sides and the scheduler side ---------------------------------------------------------


def tag(child: int, key: TransferKey) -> TransferKey:
    """The key of a child's transfer among those of all children, for workers' reports and holds."""
    return key._replace(child=child)


def untag(key: TransferKey) -> tuple[int, TransferKey]:
    """(child, its own key) of a tagged key."""
    assert key.child is not None
    return key.child, key._replace(child=None)


# --- blobs between engines ----------------------------------------------------------------------------------------


def encode_handoff(payloads: Sequence[bytes | None]) -> bytes:
    """A hand-off's payload, with one per child; None: that child has none."""
    return _encoder.encode(payloads)


def bound_handoff(payloads: Sequence[bytes | None]) -> list[bytes | None]:
    """Leave out the longest payloads until the hand-off is within its limit."""
    kept = list(payloads)
    while len(encode_handoff(kept)) > MAX_BLOB_BYTES:
        longest = max(range(len(kept)), key=lambda i: len(kept[i] or b""))
        kept[longest] = None
    return kept


def decode_handoff(payload: bytes, num_children: int) -> list[bytes | None] | None:
    """The children's payloads; None: it is not a hand-off of that many."""
    try:
        payloads = decode_total(_handoffs, payload)
    except MalformedMessage:
        return None
    return payloads if len(payloads) == num_children else None


def encode_ticket(child: int, ticket: bytes) -> bytes:
    """Encode the ticket of the one child that gave one."""
    return _encoder.encode(Ticket(child, ticket))


def decode_ticket(ticket: bytes) -> Ticket | None:
    """The number of the child and its ticket; None: it is malformed."""
    try:
        return decode_total(_tickets, ticket)
    except MalformedMessage:
        return None


def encode_handshake(names: Sequence[str], blobs: Sequence[bytes]) -> bytes:
    """A rank's part of the card: every child's, by name."""
    return _encoder.encode([Part(name, blob) for name, blob in zip(names, blobs, strict=True)])


def split_card(card: EngineCard, children: Sequence[ConnectorPlan]) -> list[EngineCard] | str:
    """A peer's card as each child would see it; a text if it lists other children: what the peer is."""
    ranks: list[list[Part]] = []
    for blob in card.rank_blobs:
        try:
            ranks.append(decode_total(_handshakes, blob))
        except MalformedMessage:
            return f"connector {card.connector}, which lists no children on its card"
    names = [child.name for child in children]
    for parts in ranks:
        if [part.name for part in parts] != names:
            return f"{card.connector} of {','.join(part.name for part in parts)}"
    return [
        msgspec.structs.replace(card, **child.on_card(), rank_blobs=[parts[index].blob for parts in ranks])
        for index, child in enumerate(children)
    ]
