"""Stored values that are not what was saved: ways to damage them, and a store that knows what is in it.

    store = KnownStore(open_store(url))          # any KVStore; engines use it as it is
    damage(store, key, "flip", random.Random(1)) # what `get(key)` gives from now on

The damaged value is whole and well-formed as far as the store itself can tell: what notices is the connector. Damage
below a store, such as to the bytes of a file, is for that store's own tests (`MUTATIONS` change any bytes).
"""

import random
import struct
from collections.abc import Callable, Mapping, Sequence

from pdkv.connectors.store.envelope import ENVELOPE_BYTES
from pdkv.kv_store.base import Arrived, Buffer, KVStore, Scattered, TermsOf

Mutation = Callable[[bytes, random.Random], bytes]


def flip(value: bytes, rng: random.Random) -> bytes:
    """One bit."""
    changed = bytearray(value)
    changed[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(value: bytes, rng: random.Random) -> bytes:
    """Any number of its last bytes are gone, all of them perhaps."""
    return value[: rng.randrange(len(value))]


def extend(value: bytes, rng: random.Random) -> bytes:
    """More bytes behind it, up to its own size."""
    return value + rng.randbytes(rng.randint(1, len(value)))


def zero(value: bytes, rng: random.Random) -> bytes:
    return bytes(len(value))


def ones(value: bytes, rng: random.Random) -> bytes:
    return b"\xff" * len(value)


def garble(value: bytes, rng: random.Random) -> bytes:
    """Noise of the same size."""
    return rng.randbytes(len(value))


def zero_tail(value: bytes, rng: random.Random) -> bytes:
    """As a write that was torn: from some place on there are zeros. The envelope's own last bytes are zeros anyway."""
    start = rng.randrange(len(value) - ENVELOPE_BYTES)
    return value[:start] + bytes(len(value) - start)


def old_format(value: bytes, rng: random.Random) -> bytes:
    """The body alone, as it was stored before there were envelopes."""
    return value[:-ENVELOPE_BYTES]


def other_version(value: bytes, rng: random.Random) -> bytes:
    """The envelope of another format."""
    changed = bytearray(value)
    struct.pack_into("<H", changed, len(value) - ENVELOPE_BYTES + 4, rng.randint(2, 0xFFFF))
    return bytes(changed)


MUTATIONS: Mapping[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (flip, truncate, extend, zero, ones, garble, zero_tail, old_format, other_version)
}


class KnownStore(KVStore):
    """A store, and the values that were put into it."""

    def __init__(self, inner: KVStore) -> None:
        self.inner = inner
        self.saved: dict[bytes, bytes] = {}  # by key; what the last put of each key brought, deleted ones too
        self.num_asked: dict[bytes, int] = {}  # how often each key was read

    def replace(self, key: bytes, value: bytes) -> None:
        """Store something else under a key."""
        self.inner.delete([key])
        self.inner.put([(key, memoryview(value))])

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.contains(keys)

    def contains_for_all(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.contains_for_all(keys)

    def get(self, keys: Sequence[bytes], out: Sequence[Buffer]) -> list[bool]:
        for key in keys:
            self.num_asked[key] = self.num_asked.get(key, 0) + 1
        return self.inner.get(keys, out)

    @property
    def can_scatter(self) -> bool:
        return self.inner.can_scatter

    def read_scattered(
        self, keys: Sequence[bytes], out: Sequence[Scattered], arrived: Arrived, terms_of: TermsOf
    ) -> list[bool]:
        for key in keys:
            self.num_asked[key] = self.num_asked.get(key, 0) + 1
        return self.inner.read_scattered(keys, out, arrived, terms_of)

    def put(self, items: Sequence[tuple[bytes, Buffer]]) -> None:
        self.inner.put(items)
        self.saved.update((key, bytes(value)) for key, value in items)

    def delete(self, keys: Sequence[bytes]) -> None:
        self.inner.delete(keys)

    def count_damaged(self) -> int:
        return self.inner.count_damaged()

    def close(self) -> None:
        self.inner.close()


def damage(store: KnownStore, key: bytes, mutation: str, rng: random.Random) -> None:
    """Replace a value that was saved by one of MUTATIONS of it."""
    changed = MUTATIONS[mutation](store.saved[key], rng)
    assert changed != store.saved[key]
    store.replace(key, changed)


def swap(store: KnownStore, one: bytes, other: bytes) -> None:
    """Each has the other's value."""
    assert store.saved[one] != store.saved[other]
    store.replace(one, store.saved[other])
    store.replace(other, store.saved[one])
