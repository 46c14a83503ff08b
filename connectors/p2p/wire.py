"""What the two ends of a `p2p` link say to each other beside the KV itself: typed frames on a TCP connection.

The sender connects, and both ends prove who they are (peer/auth.py); after Welcome both make a group of two, by Put.
Then per piece: Offer, Accepted, the KV over the group, Delivered. Anything may be answered by Refused. A frame is a
sealed header and msgpack.
"""

import contextlib
import socket
import time
from typing import Literal

import msgspec

from pdkv.connectors.peer.auth import HEADER_BYTES, Party, Session, dial, digest_of
from pdkv.connectors.peer.push_worker import PieceRange
from pdkv.errors import (
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

CHANNEL = "p2p"
MAX_FRAME_BYTES = 1 << 20
_REASONS: dict[str, type[TransferError]] = {
    error.code: error for error in (KVNotFound, PeerGone, StaleEpoch, TransferCancelled, TransferError, TransferTimeout)
}


class Address(msgspec.Struct, frozen=True, array_like=True):
    """How a rank is reached: in the engine's card. `secret` is known to who has the card, and to nobody else."""

    host: str
    port: int
    secret: bytes
    backend: str  # "gloo" or "nccl"

    def __repr__(self) -> str:
        return f"Address({self.host!r}, {self.port}, secret not shown, {self.backend!r})"


class _Frame(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all frames."""


class Welcome(_Frame, frozen=True):
    """The receiver makes its half of the group now."""


class Put(_Frame, frozen=True):
    """While the group is made: a value that the other end looks for."""

    key: str
    value: bytes


class Offer(_Frame, frozen=True, kw_only=True):
    """A piece that the sender has, as the receiver counts."""

    transfer_id: str
    attempt: int
    piece: PieceRange
    form: Literal["blocks", "units"]  # blocks: of all layers
    runs: list[tuple[int, int]] = []  # form blocks: (first block of the request, count) that go as they lie
    per_message: int  # blocks or units of one message
    timeout_s: float


class Accepted(_Frame, frozen=True):
    """The receiver is ready for the piece's messages."""


class Delivered(_Frame, frozen=True):
    """All of the piece is in its blocks."""


class Refused(_Frame, frozen=True):
    """Why not; `code` is a TransferError's."""

    code: str
    text: str


Frame = Welcome | Put | Offer | Accepted | Delivered | Refused

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def refusal(error: PdkvError) -> Refused:
    """An error on its way to the peer."""
    return Refused(error.code, str(error)[:500])


class Control:
    """One end of a connection. One thread uses it; any may `interrupt` it.

    All errors are TransferErrors: PeerGone when the connection ended, TransferTimeout when the peer is silent,
    Unauthenticated for what the peer has not said, TransferError for what is no frame.
    """

    def __init__(self, connection: socket.socket, peer: str, session: Session | None = None) -> None:
        """`session`: None for an end that dials, which has to `greet` first."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._peer = peer
        self._session = session

    def greet(self, secret: bytes, source: Party, target: Party, timeout_s: float) -> None:
        """Prove who this is, and have the other end prove it. Raises also what `dial` does."""
        self._session = dial(self._socket, secret, CHANNEL, source, target, timeout_s)

    def send(self, frame: Frame, timeout_s: float) -> None:
        """Send a frame."""
        assert self._session is not None, "greet comes first"
        data = _encoder.encode(frame)
        header = self._session.sending.make(len(data), digest_of(data))
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(header + data)
        except TimeoutError:
            raise TransferTimeout(f"{self._peer} takes nothing for {timeout_s:g} s") from None
        except OSError as error:
            raise PeerGone(f"{self._peer}: {error.strerror or error}") from error

    def receive(self, timeout_s: float, *, idle_s: float | None = None) -> Frame:
        """Wait for a frame, for its beginning up to `idle_s` where that is given."""
        assert self._session is not None, "greet comes first"
        header = self._read(HEADER_BYTES, timeout_s if idle_s is None else idle_s)
        size, digest = self._session.receiving.open(header)
        if not 0 < size <= MAX_FRAME_BYTES:
            raise TransferError(f"{self._peer} sent no frame: {size} bytes are announced")
        data = self._read(size, timeout_s)
        if digest_of(data) != digest:
            raise Unauthenticated(f"{self._peer}: a message was changed on its way")
        try:
            return decode_total(_decoder, data)
        except MalformedMessage as error:
            raise TransferError(f"{self._peer} sent no frame: {error}") from error

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

    @property
    def is_open(self) -> bool:
        """Whether the peer has neither closed the connection nor said something that nobody asked for."""
        try:
            self._socket.settimeout(0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def fileno(self) -> int:
        """The descriptor, which is ready to be read when the connection has ended, too."""
        return self._socket.fileno()

    def interrupt(self) -> None:
        """By any thread: the connection ends, and a thread that waits here wakes up with PeerGone."""
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that uses it. Idempotent."""
        self.interrupt()
        self._socket.close()

    def _read(self, size: int, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        data = bytearray()
        while len(data) < size:
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                part = self._socket.recv(size - len(data))
            except TimeoutError:
                raise TransferTimeout(f"{self._peer} says nothing for {timeout_s:g} s") from None
            except OSError as error:
                raise PeerGone(f"{self._peer}: {error.strerror or error}") from error
            if not part:
                raise PeerGone(f"{self._peer} closed the connection")
            data += part
        return bytes(data)
