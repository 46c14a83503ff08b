"""The envelope after every stored value, by which readers recognize valid values.

A value is its body, which is KV, and an envelope of 64 bytes:

| bytes | |
|---|---|
| 0-3 | `pdkv` |
| 4-5 | format, 1 |
| 6-7 | 0: a checksum follows; 1: a signature |
| 8-15 | bytes of the body |
| 16-47 | xxh3-128 of key and body, and 16 zeros; signed: the keyed BLAKE2b-256 of key and body |
| 48-55 | its expiry: the unix time in seconds from which on it is not used; 0: it does not expire |
| 56-63 | zeros |

For a value that expires, bytes 16-47 are the same kind of hash over that hash and the expiry, so that the value is
invalid if the expiry is removed or changed.

The envelope follows the body, so that the body keeps the alignment that a store or a device gives to the value. A value
is whole if its envelope is, byte for byte, the one computed from its key, its body and its expiry.
"""

import hashlib
import hmac
import struct
from collections.abc import Callable
from typing import Protocol, Self

import xxhash

from pdkv.kv_store.base import Buffer, Scattered

FORMAT = 1
ENVELOPE_BYTES = 64


class _Hash(Protocol):
    """A hash object of hashlib or xxhash."""

    def update(self, data: Buffer, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> Self: ...


_ENVELOPE = struct.Struct("<4sHHQ32sQ8x")
_END = struct.Struct("<Q")
_MAGIC = b"pdkv"
_IDENTITY_BYTES = 8
assert _ENVELOPE.size == ENVELOPE_BYTES


class Sealer:
    """Makes envelopes and verifies them. Threads may share it. xxhash holds the GIL, for some 40 us per MiB.

    Args:
        secret: None: checksums, which only detect damage. Otherwise signatures, which cannot be forged without it.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._mac_key = None if secret is None else _derive(secret, b"pdkv-value-mac", hashlib.blake2b.MAX_KEY_SIZE)
        self.identity = b"" if secret is None else _derive(secret, b"pdkv-value-id", _IDENTITY_BYTES)
        """Distinguishes engines with different secrets without revealing the secret; empty: unsigned."""

    def seal(self, key: bytes, value: Buffer, expires_at: int = 0) -> None:
        """Write the envelope of value[:-ENVELOPE_BYTES] into the bytes after it. `expires_at`: unix time; 0: it does
        not expire.
        """
        check = self.check(key, Scattered(value))
        check.arrived(len(value))
        value[-ENVELOPE_BYTES:] = check.envelope(expires_at)

    def check(self, key: bytes, value: Scattered) -> "Check":
        """A `Check` for a value about to be read into these buffers; the last buffer holds the whole envelope."""
        return Check(self._hash(key), value, self._bind, is_signed=self._mac_key is not None)

    def _hash(self, key: bytes, person: bytes = b"") -> "_Hash":
        if self._mac_key is None:
            return xxhash.xxh3_128(key)
        return hashlib.blake2b(key, digest_size=32, key=self._mac_key, person=person)

    def _bind(self, digest: bytes, expires_at: int) -> bytes:
        """The hash of a value that expires, made from its hash without the time, which a signed value does not
        reveal.
        """
        return self._hash(digest + _END.pack(expires_at), b"pdkv-value-end").digest() if expires_at else digest


class Check:
    """Reads a value's body once, as it arrives."""

    def __init__(
        self, empty: "_Hash", value: Scattered, bind: Callable[[bytes, int], bytes], *, is_signed: bool
    ) -> None:
        """`empty`: a hash that already contains the key. `bind`: binds a hash to an expiry time."""
        self._bind = bind
        self._empty = empty
        self._hash = empty.copy()
        self._value = value
        self._envelope = value.buffers[-1][-ENVELOPE_BYTES:]
        self._body_bytes = max(len(value) - ENVELOPE_BYTES, 0)
        self._is_signed = is_signed
        self._done = 0

    def arrived(self, stop: int) -> None:
        """Note that bytes [0, stop) of the value have arrived; fewer than before: they have been read again."""
        if stop <= self._done:
            self._hash, self._done = self._empty.copy(), 0
        for part in self._value.stretch(self._done, min(stop, self._body_bytes)):
            self._hash.update(part)
        self._done = stop

    def is_whole(self) -> bool:
        """Whether the buffer holds a value saved with the same secret under this key."""
        if self._done < len(self._value):
            self.arrived(len(self._value))
        return hmac.compare_digest(self._envelope, self.envelope(self.expires_at))

    @property
    def expires_at(self) -> int:
        """The expiry time in the envelope, as unix time; 0: none. Only reliable for an intact value."""
        return int(_ENVELOPE.unpack(self._envelope)[-1]) if len(self._envelope) == ENVELOPE_BYTES else 0

    def envelope(self, expires_at: int) -> bytes:
        """The envelope for the body and this expiry time."""
        digest = self._bind(self._hash.digest(), expires_at)
        return _ENVELOPE.pack(_MAGIC, FORMAT, int(self._is_signed), self._body_bytes, digest, expires_at)


def _derive(secret: bytes, person: bytes, size: int) -> bytes:
    """A key or a name for one purpose."""
    return hashlib.blake2b(secret, digest_size=size, person=person).digest()
