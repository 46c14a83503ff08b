"""Frames: the content of one ZeroMQ message. A sender splits frames far below the receiver's limit. A receiver
validates each message on its own, so that a bad one affects only its own request.
"""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple, cast

import msgspec

from pdkv.base.limits import MAX_ID_CHARS
from pdkv.errors import MalformedMessage, UnsendableMessage
from pdkv.wire.decoding import decode_total
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import EngineToRouter, Peers, Ready, RouterToEngine
from pdkv.wire.types import MAX_CARDS, Attempt, Id, RequestKey

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 20
"""A peer that sends a larger frame is disconnected."""

FRAME_BYTES = 1 << 20
"""Bytes after which a frame takes no further message: the next one begins another frame."""

MAX_MESSAGE_BYTES = MAX_FRAME_BYTES - 4096
"""The most bytes of one message, so that a frame can carry it."""

MAX_FRAME_MESSAGES = 1 << 16
"""The most messages of one frame: a message may be a byte, but costs its receiver a hundred times as many."""

PIECE_BYTES = 8 << 10
PIECE_MESSAGES = 1 << 10
"""Bytes that `frame_pieces` decodes in one go. A router then writes some 130 tokens to their streams, or 30 with 20
alternatives each, in the next turn of its event loop: five milliseconds.
"""

AnyMessage = RouterToEngine | EngineToRouter
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class BadMessage(NamedTuple):
    """A message that cannot be decoded, or has a value out of its range."""

    reason: str
    param: str  # the field at fault; "" if it is the whole
    key: RequestKey | None  # the request that it belongs to, if known
    protocol: int | None = None  # of a Ready: the engine's version, which may be why it is unreadable


_Received = list[AnyMessage | BadMessage]


class ReceivedFrame(NamedTuple):
    """A frame from a peer, with its messages decoded as far as they are valid."""

    number: int
    messages: _Received
    begun: int = 0
    handled: int = 0
    has_bad: bool = False  # whether one of the messages is a BadMessage


class _RawFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """A frame as it travels. `number` counts frames per connection and direction; a gap is a failure.

    From an engine, `begun` and `handled` count the router's frames that it has begun to handle, and has handled: when
    the connection ends, the frames in between may have killed it.
    """

    number: Number
    messages: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_FRAME_MESSAGES)]
    begun: Number = 0
    handled: Number = 0


class _GoodFrame(msgspec.Struct, frozen=True):
    """A frame decoded in one go: for frames with only valid messages, as nearly all are."""

    number: Number
    messages: Annotated[list[AnyMessage], msgspec.Meta(max_length=MAX_FRAME_MESSAGES)]
    begun: Number = 0
    handled: Number = 0


class _RawPeers(msgspec.Struct, frozen=True, tag=Peers.__name__):
    """Peers with cards that are decoded one by one."""

    cards: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_CARDS)]
    removed: Annotated[list[Id], msgspec.Meta(max_length=MAX_CARDS)] | None = None


class _About(msgspec.Struct, frozen=True):
    """The request that a message is about, whatever else is in it."""

    type: msgspec.Raw = msgspec.Raw()  # of any kind and size: not decoded
    request_id: Annotated[str, msgspec.Meta(max_length=MAX_ID_CHARS)] = ""
    attempt: Attempt | None = None
    protocol: Number = 1


_UNKNOWN_TYPE = re.compile(r"Invalid value .* - at `\$\.type`$", re.DOTALL)

_encoder = msgspec.msgpack.Encoder()
_good_frames = msgspec.msgpack.Decoder(_GoodFrame)
_frames = msgspec.msgpack.Decoder(_RawFrame)
_messages: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_lists: msgspec.msgpack.Decoder[list[AnyMessage]] = msgspec.msgpack.Decoder(list[AnyMessage])
_abouts = msgspec.msgpack.Decoder(_About)
_raw_peers = msgspec.msgpack.Decoder(_RawPeers)
_cards = msgspec.msgpack.Decoder(EngineCard)
_READY = _encoder.encode(Ready.__name__)


def encode_message(message: AnyMessage) -> msgspec.Raw:
    """Encode a message for a frame.

    Raises:
        UnsendableMessage: it is longer than MAX_MESSAGE_BYTES, or has a value that msgpack cannot express.
    """
    try:
        data = _encoder.encode(message)
    except (OverflowError, ValueError, TypeError) as error:  # an integer of more than 64 bits, an invalid text
        raise UnsendableMessage(f"{type(message).__name__} cannot be sent: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise UnsendableMessage(
            f"{type(message).__name__} has {len(data)} bytes; at most {MAX_MESSAGE_BYTES} can be sent"
        )
    return msgspec.Raw(data)


def split(messages: Iterable[msgspec.Raw]) -> Iterator[list[msgspec.Raw]]:
    """The messages, in order, in groups of one frame each: up to MAX_FRAME_MESSAGES, and FRAME_BYTES plus one
    message.
    """
    return _groups(messages, FRAME_BYTES, MAX_FRAME_MESSAGES)


def _groups(messages: Iterable[msgspec.Raw], num_bytes: int, num_messages: int) -> Iterator[list[msgspec.Raw]]:
    """Each ends with the message that brings it to one of these bounds."""
    group: list[msgspec.Raw] = []
    size = 0
    for message in messages:
        group.append(message)
        size += len(memoryview(message))
        if size >= num_bytes or len(group) >= num_messages:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_raw_frame(number: int, messages: list[msgspec.Raw], *, begun: int = 0, handled: int = 0) -> bytes:
    """Put encoded messages into a frame."""
    return _encoder.encode(_RawFrame(number, messages, begun, handled))


def decode_frame(data: bytes) -> ReceivedFrame:
    """Decode a frame and validate each message in it; a bad one becomes a BadMessage in its place.

    Raises:
        MalformedMessage: `data` is not a frame (the caller counts and drops it).
    """
    try:
        good = decode_total(_good_frames, data)
    except MalformedMessage:
        pass
    else:
        return ReceivedFrame(good.number, cast(_Received, good.messages), good.begun, good.handled)
    frame = decode_total(_frames, data)
    messages = [decode_message(memoryview(raw)) for raw in frame.messages]
    has_bad = any(isinstance(message, BadMessage) for message in messages)
    return ReceivedFrame(frame.number, messages, frame.begun, frame.handled, has_bad)


def frame_pieces(data: bytes) -> Iterator[ReceivedFrame]:
    """As `decode_frame`, in pieces that are decoded one by one.

    Raises:
        MalformedMessage: `data` is not a frame; before the first piece.
    """
    frame = decode_total(_frames, data)
    groups = _groups(frame.messages, PIECE_BYTES, PIECE_MESSAGES)
    yield _piece(frame, next(groups, []))  # also where there is no message
    for group in groups:
        yield _piece(frame, group)


def _piece(frame: _RawFrame, group: list[msgspec.Raw]) -> ReceivedFrame:
    try:
        good = decode_total(_lists, b"\xdd%b%b" % (len(group).to_bytes(4), b"".join(group)))
    except MalformedMessage:
        messages = [decode_message(memoryview(raw)) for raw in group]
        has_bad = any(isinstance(message, BadMessage) for message in messages)
        return ReceivedFrame(frame.number, messages, frame.begun, frame.handled, has_bad)
    return ReceivedFrame(frame.number, cast(_Received, good), frame.begun, frame.handled)


def decode_message(data: bytes | memoryview) -> AnyMessage | BadMessage:
    """Decode and validate one message. Never raises."""
    try:
        return decode_total(_messages, data)
    except MalformedMessage as error:
        reason = str(error)
    with contextlib.suppress(MalformedMessage):
        return _readable_peers(decode_total(_raw_peers, data))
    if _UNKNOWN_TYPE.search(reason):  # from a newer peer: skipped, and not its request's fault
        return BadMessage(f"a message of an unknown type: {reason}", "type", None)
    _, _, path = reason.partition(" - at `$.")
    bad = BadMessage(reason, path.rstrip("`").partition("[")[0].rpartition(".")[2], None)
    try:
        about = decode_total(_abouts, data)
    except MalformedMessage:
        return bad
    key = (about.request_id, about.attempt) if about.request_id and about.attempt is not None else None
    is_ready = memoryview(about.type) == _READY
    return bad._replace(key=key, protocol=about.protocol if is_ready else None)


def key_of(message: AnyMessage) -> RequestKey | None:
    """The request that a message belongs to; None: none."""
    request_id, attempt = getattr(message, "request_id", None), getattr(message, "attempt", None)
    return (request_id, attempt) if isinstance(request_id, str) and isinstance(attempt, int) else None


def _readable_peers(raw: _RawPeers) -> Peers:
    """The peers with cards that can be read: such a message may be a difference, which comes once."""
    cards = []
    for card in raw.cards:
        try:
            cards.append(decode_total(_cards, memoryview(card)))
        except MalformedMessage as error:
            logger.warning("the card of an engine cannot be read, so that no KV passes to it or from it: %s", error)
    return Peers(cards, raw.removed)
