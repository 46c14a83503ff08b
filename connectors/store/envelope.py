"""What stands behind every stored value, so that no reader takes anything else for it.

A value is its body, which is KV, and an envelope of 64 bytes:

| bytes | |
|---|---|
| 0-3 | `pdkv` |
| 4-5 | format, 1 |
| 6-7 | 0: a checksum follows; 1: a signature |
| 8-15 | bytes of the body |
| 16-47 | xxh3-128 of key and body, and 16 zeros; signed: the keyed BLAKE2b-256 of key and body |
| 48-63 | zeros |

It stands behind the body, so that the body keeps the alignment which a store or a device gives to the value. A value is
whole if its envelope is, byte for byte, the one that follows from its key and its body.
"""

import hashlib
import hmac
import struct
from typing import Protocol, Self

import xxhash

from pdkv.kv_store.base import Buffer

FORMAT = 1
ENVELOPE_BYTES = 64


class _Hash(Protocol):
    """Of hashlib or xxhash."""

    def update(self, data: Buffer, /) -> None: ...
    def digest(self) -> bytes: ...
    def copy(self) -> Self: ...


_ENVELOPE = struct.Struct("<4sHHQ32s16x")
_MAGIC = b"pdkv"
_IDENTITY_BYTES = 8
assert _ENVELOPE.size == ENVELOPE_BYTES


class Sealer:
    """Makes envelopes and verifies them. Threads may share it. xxhash keeps the GIL, some 40 us a MiB.

    Args:
        secret: None: checksums, against damage only. With one: signatures, against whoever does not have it.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._mac_key = None if secret is None else _derive(secret, b"pdkv-value-mac", hashlib.blake2b.MAX_KEY_SIZE)
        self.identity = b"" if secret is None else _derive(secret, b"pdkv-value-id", _IDENTITY_BYTES)
        """Tells engines with different secrets from each other and tells nothing of the secret; empty: unsigned."""

    def seal(self, key: bytes, value: Buffer) -> None:
        """Write the envelope of value[:-ENVELOPE_BYTES] into the bytes behind it."""
        check = self.check(key, value)
        check.arrived(len(value))
        value[-ENVELOPE_BYTES:] = check.envelope()

    def check(self, key: bytes, value: Buffer) -> "Check":
        """The check of a value that is to come into this buffer."""
        return Check(self._hash(key), value, is_signed=self._mac_key is not None)

    def _hash(self, key: bytes) -> "_Hash":
        if self._mac_key is None:
            return xxhash.xxh3_128(key)
        return hashlib.blake2b(key, digest_size=32, key=self._mac_key)


class Check:
    """Reads a value's body once, as it comes in."""

    def __init__(self, empty: "_Hash", value: Buffer, *, is_signed: bool) -> None:
        """`empty`: has read the key."""
        self._empty = empty
        self._hash = empty.copy()
        self._value = value
        self._body_bytes = max(len(value) - ENVELOPE_BYTES, 0)
        self._is_signed = is_signed
        self._done = 0

    def arrived(self, stop: int) -> None:
        """Bytes [0, stop) of the value are there; fewer than before: they have come anew."""
        if stop <= self._done:
            self._hash, self._done = self._empty.copy(), 0
        if self._done < self._body_bytes:
            self._hash.update(self._value[self._done : min(stop, self._body_bytes)])
        self._done = stop

    def is_whole(self) -> bool:
        """Whether the buffer holds what somebody with the same secret has saved under this key."""
        if self._done < len(self._value):
            self.arrived(len(self._value))
        return hmac.compare_digest(self._value[-ENVELOPE_BYTES:], self.envelope())

    def envelope(self) -> bytes:
        """That of the body."""
        return _ENVELOPE.pack(_MAGIC, FORMAT, int(self._is_signed), self._body_bytes, self._hash.digest())


def _derive(secret: bytes, person: bytes, size: int) -> bytes:
    """A key or a name for one purpose."""
    return hashlib.blake2b(secret, digest_size=size, person=person).digest()
