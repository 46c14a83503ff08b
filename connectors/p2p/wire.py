"""Typed frames between the two ends of a `p2p` link, on the socket that also carries the KV.

The sender connects, both ends authenticate (peer/auth.py), and the receiver says Welcome when it has room. Then per
piece: Offer, Accepted, the raw KV, End, Delivered. Any frame may be answered by Refused. A frame is a sealed header and
msgpack.
"""

import socket
from typing import Literal

import msgspec

from pdkv.connectors.p2p.sockets import Connection
from pdkv.connectors.peer.auth import HEADER_BYTES, Party, Session, dial, digest_of
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.errors import (
    KVCorrupted,
    KVNotFound,
    MalformedMessage,
    PdkvError,
    PeerGone,
    StaleEpoch,
    TransferCancelled,
    TransferError,
    TransferTimeout,
    Unauthenticated,
)
from pdkv.wire.decoding import decode_total

FRAMES_VERSION = 2
"""Version of everything sent on a link: cards carry it, and engines of two versions exchange nothing."""

CHANNEL = f"p2p/{FRAMES_VERSION}"
NCCL = "nccl"
"""The purpose of a link with KV over NCCL. Other links have none, or the token of the link that gets a second
socket.
"""

MAX_FRAME_BYTES = 1 << 20
_REASONS: dict[str, type[TransferError]] = {
    error.code: error
    for error in (
        KVCorrupted,
        KVNotFound,
        PeerGone,
        StaleEpoch,
        TransferCancelled,
        TransferError,
        TransferTimeout,
        Unauthenticated,
    )
}


class Address(msgspec.Struct, frozen=True, array_like=True):
    """How a rank is reached: part of the engine's card. `secret` is known only to holders of the card."""

    frames: int  # FRAMES_VERSION; stays the first field: engines of earlier builds compare it
    host_id: str  # the host, within which alone the abstract unix socket can be reached
    unix_name: str
    host: str
    port: int
    secret: bytes
    in_blocks: bool  # whole blocks can be received directly: the pool is in host memory
    gpu: str = ""  # the GPU, if NCCL can be used

    def __repr__(self) -> str:
        return f"Address({self.unix_name!r}, {self.host!r}, {self.port}, secret not shown)"


def why_not_nccl(own: Address, peer: Address) -> str:
    """Why KV is not sent over NCCL between two ranks; empty: it is."""
    if not (own.gpu and peer.gpu):
        return "at least one of them does not keep KV on a GPU or lacks NCCL"
    if own.gpu == peer.gpu:
        return f"both keep KV on GPU {own.gpu}, but NCCL refuses two ranks on one GPU"
    return ""


class _Frame(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all frames."""


class Welcome(_Frame, frozen=True):
    """There is room for the link; the token is for a second socket of it."""

    token: str = ""


class Put(_Frame, frozen=True):
    """While an NCCL group is made: a value for the other end."""

    key: str
    value: bytes


class Offer(_Frame, frozen=True, kw_only=True):
    """A piece that the sender has, in the receiver's numbering."""

    transfer_id: str
    attempt: int
    piece: PieceRange
    form: Literal["blocks", "units"]  # blocks: of all layers
    num_bytes: int
    per_batch: int  # blocks or units sent over one socket before the next one has its turn
    num_sockets: int = 1
    timeout_s: float


class Accepted(_Frame, frozen=True):
    """The receiver is ready for the piece."""


class End(_Frame, frozen=True):
    """All of the piece has been sent."""

    body: bytes = b""  # the xxh3-128 of all bytes, seeded by the session; over TCP, without digests
    digests: bytes = b""  # of the KV, by transfer/digest.py


class Delivered(_Frame, frozen=True):
    """All of the piece is in its blocks."""


class Refused(_Frame, frozen=True):
    """A refusal with its reason; `code` is a TransferError's."""

    code: str
    text: str


Frame = Welcome | Put | Offer | Accepted | End | Delivered | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def refusal(error: PdkvError) -> Refused:
    """The frame for an error."""
    return Refused(error.code, str(error)[:500])


class Control:
    """One end of a link's frames, on its first socket. One thread uses it; any may `interrupt` it.

    All errors are TransferErrors: PeerGone when the connection ended, TransferTimeout when the peer is silent,
    Unauthenticated for data that is not the peer's, TransferError for an invalid frame.
    """

    def __init__(self, connected: socket.socket, peer: str, session: Session | None = None) -> None:
        """`session`: None for an end that dials, which must call `greet` first."""
        self.connection = Connection(connected, peer)
        self._peer = peer
        self._session = session

    @property
    def session(self) -> Session:
        """The session that both ends have agreed upon."""
        assert self._session is not None, "greet must be called first"
        return self._session

    def greet(self, secret: bytes, source: Party, target: Party, timeout_s: float, purpose: str = "") -> None:
        """Authenticate both ends. Also raises what `dial` raises."""
        connected = self.connection.socket
        self._session = dial(connected, secret, CHANNEL, source, target, timeout_s, purpose)
        connected.setblocking(True)

    def send(self, frame: Frame, timeout_s: float) -> None:
        """Send a frame."""
        data = _encoder.encode(frame)
        header = self.session.sending.make(len(data), digest_of(data))
        self.connection.send(header + data, timeout_s)

    def receive(self, timeout_s: float, *, idle_s: float | None = None) -> Frame:
        """Wait for a frame; for its beginning, up to `idle_s` if that is given."""
        header = self.connection.receive(HEADER_BYTES, timeout_s if idle_s is None else idle_s)
        size, digest = self.session.receiving.open(header)
        if not 0 < size <= MAX_FRAME_BYTES:
            raise TransferError(f"{self._peer} sent an invalid frame: it announces {size} bytes")
        data = self.connection.receive(size, timeout_s)
        if digest_of(data) != digest:
            raise Unauthenticated(f"{self._peer}: a message was altered in transit")
        try:
            return decode_total(_decoder, data)
        except MalformedMessage as error:
            raise TransferError(f"{self._peer} sent an invalid frame: {error}") from error

    def ask(self, frame: Frame, timeout_s: float) -> Frame:
        """Send a frame and wait for the answer; a refusal is raised as the error that it names."""
        self.send(frame, timeout_s)
        return self.expect(timeout_s)

    def expect(self, timeout_s: float) -> Frame:
        """Wait for an answer; a refusal is raised as the error that it names."""
        answer = self.receive(timeout_s)
        if isinstance(answer, Refused):
            raise _REASONS.get(answer.code, TransferError)(f"{self._peer} refuses: {answer.text}")
        return answer

    def interrupt(self) -> None:
        """End the connection from any thread; a waiting thread wakes up with PeerGone."""
        self.connection.interrupt()

    def close(self) -> None:
        """Close, on the thread that uses it. Idempotent."""
        self.connection.close()
