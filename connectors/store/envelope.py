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

import xxhash

from pdkv.kv_store.base import Buffer

FORMAT = 1
ENVELOPE_BYTES = 64

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
        value[-ENVELOPE_BYTES:] = self._envelope(key, value[:-ENVELOPE_BYTES])

    def is_whole(self, key: bytes, value: Buffer) -> bool:
        """Whether this is what somebody with the same secret has saved under this key."""
        expected = self._envelope(key, value[:-ENVELOPE_BYTES])
        return hmac.compare_digest(value[-ENVELOPE_BYTES:], expected)

    def _envelope(self, key: bytes, body: Buffer) -> bytes:
        if self._mac_key is None:
            checksum = xxhash.xxh3_128(key)
            checksum.update(body)
            return _ENVELOPE.pack(_MAGIC, FORMAT, 0, len(body), checksum.digest())
        signature = hashlib.blake2b(key, digest_size=32, key=self._mac_key)
        signature.update(body)
        return _ENVELOPE.pack(_MAGIC, FORMAT, 1, len(body), signature.digest())


def _derive(secret: bytes, person: bytes, size: int) -> bytes:
    """A key or a name for one purpose."""
    return hashlib.blake2b(secret, digest_size=size, person=person).digest()
