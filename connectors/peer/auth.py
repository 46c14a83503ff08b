"""How the two ends of a connection authenticate each other: challenge and response, then headers with a MAC.

A listener has a secret, which is in its engine's card and nowhere else. The dialer names itself and the rank it wants;
the listener proves that it knows the secret, then the dialer does. The secret itself is never sent, so that neither an
impostor on the port nor an eavesdropper learns anything. Both proofs and all keys cover everything that was said: the
channel, both ends' names (engine, epoch, rank) and both nonces; so no part can be replayed or reflected.

    dialer                                  listener
    Hello(channel, names, nonce)      →
                                      ←     Challenge(nonce, proof)
    Answer(proof)                     →
    (from here on each message has a header with its number, length, digest and a MAC over those)

`Acceptor` does no I/O, so that one thread can serve any number of strangers (auth_listener.py).
"""

import hashlib
import hmac
import secrets
import socket
import struct
from typing import NamedTuple

import msgspec

from pdkv.base.clock import MONOTONIC
from pdkv.errors import MalformedMessage, PeerGone, TransferTimeout, Unauthenticated
from pdkv.wire.decoding import decode_total

VERSION = 2
SECRET_BYTES = 32
MAX_GREETING_BYTES = 1024
_NONCE_BYTES = 32
_LENGTH = struct.Struct("<H")
_FIELDS = struct.Struct("<QQ16s")  # number, length, digest of the body
_MAC_BYTES = 16
HEADER_BYTES = _FIELDS.size + _MAC_BYTES


class Party(msgspec.Struct, frozen=True, array_like=True):
    """One rank of one incarnation of an engine."""

    engine: str
    epoch: str
    rank: int


class _Greeting(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the messages sent before authentication."""


class Hello(_Greeting, frozen=True):
    """The dialer, the rank that it wants, and the purpose."""

    version: int
    channel: str
    nonce: bytes
    source: Party
    target: Party
    timeout_s: float  # how long the dialer waits
    purpose: str = ""  # number of this connection among those of the channel


class Challenge(_Greeting, frozen=True):
    """The listener's nonce, and its proof that it knows the secret."""

    nonce: bytes
    proof: bytes


class Answer(_Greeting, frozen=True):
    """The dialer's proof that it knows the secret."""

    proof: bytes


_encoder = msgspec.msgpack.Encoder()
_hellos: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_challenges: msgspec.msgpack.Decoder[Challenge] = msgspec.msgpack.Decoder(Challenge)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Seal:
    """One direction of an authenticated connection: headers are made at one end and opened at the other.

    A header that was changed, repeated, omitted or moved is detected before its body is awaited.
    """

    def __init__(self, key: bytes) -> None:
        self._mac = hashlib.blake2b(key=key, digest_size=_MAC_BYTES)
        self._number = 0

    def make(self, length: int, digest: bytes) -> bytes:
        """The header of the next message to send, HEADER_BYTES long.

        Args:
            digest: 16 bytes that stand for the body, such as its `digest_of`.
        """
        fields = _FIELDS.pack(self._number, length, digest)
        self._number += 1
        return fields + self._tag(fields)

    def open(self, header: bytes) -> tuple[int, bytes]:
        """Check the header of the next message received; returns the body's length and digest.

        Raises:
            Unauthenticated: the header is not the peer's, or not its next one.
        """
        fields, tag = header[: _FIELDS.size], header[_FIELDS.size :]
        if not hmac.compare_digest(tag, self._tag(fields)):
            raise Unauthenticated("a header's MAC is wrong")
        number, length, digest = _FIELDS.unpack(fields)
        if number != self._number:
            raise Unauthenticated(f"expected message {self._number}, got {number}")
        self._number += 1
        return length, digest

    def _tag(self, fields: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(fields)
        return mac.digest()


def digest_of(body: bytes | bytearray | memoryview) -> bytes:
    """A collision-resistant digest of a body, 16 bytes."""
    return hashlib.blake2b(body, digest_size=16).digest()


class Session(NamedTuple):
    """The agreed session: the dialer, and the seal of each direction (keys and message numbers)."""

    hello: Hello
    sending: Seal
    receiving: Seal
    seed: int  # seed of digests of unsealed data; 64 bits that only the two ends know


class Acceptor:
    """The listener's end of one greeting: bytes in, bytes out; no I/O, and limited memory."""

    def __init__(self, secret: bytes, channel: str) -> None:
        self.session: Session | None = None  # once the dialer has proven itself
        self._secret = secret
        self._channel = channel
        self._buffer = b""
        self._transcript = b""
        self._hello: Hello | None = None

    def feed(self, data: bytes) -> bytes:
        """Take received bytes; returns the bytes to send.

        Raises:
            Unauthenticated: the dialer does not know the secret, or speaks another protocol.
        """
        self._buffer += data
        reply = b""
        while self.session is None:
            body = self._next_greeting()
            if body is None:
                return reply
            try:
                if self._hello is None:
                    reply += self._challenge(decode_total(_hellos, body), body)
                else:
                    self._finish(decode_total(_answers, body), self._hello)
            except MalformedMessage as error:
                raise Unauthenticated(f"not a greeting: {error}") from None
        if self._buffer:
            raise Unauthenticated("unexpected data behind the greeting")
        return reply

    def _next_greeting(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if not 0 < size <= MAX_GREETING_BYTES:
            raise Unauthenticated(f"a greeting of {size} bytes is too long")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body, self._buffer = self._buffer[_LENGTH.size : end], self._buffer[end:]
        return body

    def _challenge(self, hello: Hello, body: bytes) -> bytes:
        if hello.version != VERSION or hello.channel != self._channel or len(hello.nonce) != _NONCE_BYTES:
            theirs = f"{hello.channel[:32]!r} version {hello.version}"
            raise Unauthenticated(f"expected a greeting for {self._channel!r} version {VERSION}, got {theirs}")
        self._hello = hello
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._transcript = _transcript(body, nonce)
        return _greeting(Challenge(nonce, _derive(self._secret, "listener's proof", self._transcript)))

    def _finish(self, answer: Answer, hello: Hello) -> None:
        expected = _derive(self._secret, "dialer's proof", self._transcript)
        if not hmac.compare_digest(answer.proof, expected):
            raise Unauthenticated("the dialer does not know the secret")
        self.session = _session(self._secret, hello, self._transcript, dials=False)


def dial(
    connection: socket.socket,
    secret: bytes,
    channel: str,
    source: Party,
    target: Party,
    timeout_s: float,
    purpose: str = "",
) -> Session:
    """The dialer's end of a greeting, on a connection that has just been made. Blocks up to `timeout_s`.

    Raises:
        Unauthenticated: the listener does not know the secret, and has not learned it.
        PeerGone: the connection was closed.
        TransferTimeout: the other end is silent.
    """
    deadline = MONOTONIC.now() + timeout_s
    hello = Hello(VERSION, channel, secrets.token_bytes(_NONCE_BYTES), source, target, timeout_s, purpose)
    body = _encoder.encode(hello)
    _send(connection, _frame(body), deadline)
    (size,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline))
    if not 0 < size <= MAX_GREETING_BYTES:
        raise Unauthenticated(f"engine {target.engine}: expected a greeting, got {size} bytes")
    try:
        challenge = decode_total(_challenges, _read(connection, size, deadline))
    except MalformedMessage as error:
        raise Unauthenticated(f"engine {target.engine}: not a greeting: {error}") from None
    transcript = _transcript(body, challenge.nonce)
    expected = _derive(secret, "listener's proof", transcript)
    if len(challenge.nonce) != _NONCE_BYTES or not hmac.compare_digest(challenge.proof, expected):
        raise Unauthenticated(
            f"the listener in place of engine {target.engine} rank {target.rank} does not know its secret"
        )
    _send(connection, _greeting(Answer(_derive(secret, "dialer's proof", transcript))), deadline)
    return _session(secret, hello, transcript, dials=True)


def _session(secret: bytes, hello: Hello, transcript: bytes, *, dials: bool) -> Session:
    there = Seal(_derive(secret, "dialer to listener", transcript))
    back = Seal(_derive(secret, "listener to dialer", transcript))
    seed = int.from_bytes(_derive(secret, "seed", transcript)[:8], "little")
    return Session(hello, there, back, seed) if dials else Session(hello, back, there, seed)


def _transcript(hello: bytes, nonce: bytes) -> bytes:
    """All greetings before the proofs, which both proofs and all keys cover."""
    return hashlib.sha256(_frame(hello) + nonce).digest()


def _derive(secret: bytes, purpose: str, transcript: bytes) -> bytes:
    return hmac.digest(secret, f"pdkv {VERSION} {purpose}\0".encode() + transcript, "sha256")


def _frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _greeting(greeting: _Greeting) -> bytes:
    return _frame(_encoder.encode(greeting))


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    try:
        connection.settimeout(max(deadline - MONOTONIC.now(), 1e-3))
        connection.sendall(data)
    except TimeoutError:
        raise TransferTimeout("the other end did not read the greeting in time") from None
    except OSError as error:
        raise PeerGone(f"the connection ended during the greeting: {error.strerror}") from error


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        try:
            connection.settimeout(max(deadline - MONOTONIC.now(), 1e-3))
            part = connection.recv(size - len(data))
        except TimeoutError:
            raise TransferTimeout("the other end did not answer the greeting in time") from None
        except OSError as error:
            raise PeerGone(f"the connection ended during the greeting: {error.strerror}") from error
        if not part:
            raise PeerGone("the connection was closed during the greeting")
        data += part
    return data
