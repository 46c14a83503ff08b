"""The envelope of a stored value: what is not, byte for byte, what was saved under that key is not whole."""

import random
import struct
from itertools import pairwise, product

import pytest
import xxhash
from damage import MUTATIONS

from pdkv.connectors.store.envelope import ENVELOPE_BYTES, Sealer
from pdkv.kv_store.base import Buffer, Scattered

SIZES = (1, 64, 4096, 100_003)
SEALERS = {"checksum": Sealer(), "signature": Sealer(b"a secret of sixteen bytes or more")}


def is_whole(sealer: Sealer, key: bytes, value: Buffer) -> bool:
    return sealer.check(key, Scattered(value)).is_whole()


def sealed(sealer: Sealer, key: bytes, body: bytes, expires_at: int = 0) -> memoryview:
    value = memoryview(bytearray(body + b"x" * ENVELOPE_BYTES))
    sealer.seal(key, value, expires_at)
    return value


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", SEALERS)
def test_what_was_sealed_is_whole_under_its_own_key_only(kind: str, size: int) -> None:
    body = random.Random(size).randbytes(size)
    value = sealed(SEALERS[kind], b"key", body)
    assert value[:size] == body
    assert is_whole(SEALERS[kind], b"key", value)
    assert not is_whole(SEALERS[kind], b"kez", value)
    assert not is_whole(SEALERS[kind], b"key" + body[:1], value[1:]), "a key's end is not a body's beginning"


@pytest.mark.parametrize("kind", SEALERS)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_no_mutation_of_a_value_is_whole(kind: str, mutation: str) -> None:
    rng = random.Random(mutation)
    for _ in range(200):
        value = bytes(sealed(SEALERS[kind], b"key", rng.randbytes(rng.choice(SIZES[:3]))))
        changed = MUTATIONS[mutation](value, rng)
        assert not is_whole(SEALERS[kind], b"key", memoryview(changed)), (mutation, len(value), len(changed))


@pytest.mark.parametrize("kind", SEALERS)
def test_a_value_without_an_end_is_what_it_was_before_there_were_any(kind: str) -> None:
    """What engines of then have stored is found, and they find what engines of now store."""
    check = {
        "checksum": xxhash.xxh3_128(b"keybody").digest() + bytes(16),
        "signature": bytes.fromhex("9dfe81216e09bb33710fbb3adc4bda490efb81e23bf8032d11e4b0fd53ad0d70"),
    }[kind]
    head = b"pdkv" + struct.pack("<HHQ", 1, kind == "signature", 4)
    assert sealed(SEALERS[kind], b"key", b"body") == b"body" + head + check + bytes(16)


@pytest.mark.parametrize("kind", SEALERS)
@pytest.mark.parametrize("expires_at", [1, 1_800_000_000, 2**64 - 1])
def test_a_value_has_the_end_that_it_was_sealed_with_and_no_other(kind: str, expires_at: int) -> None:
    sealer = SEALERS[kind]
    value = sealed(sealer, b"key", b"body", expires_at)
    check = sealer.check(b"key", Scattered(value))
    assert (check.is_whole(), check.expires_at) == (True, expires_at)
    for other in (0, expires_at ^ 2, expires_at - 1):
        struct.pack_into("<Q", value, len(value) - 16, other)
        assert not is_whole(sealer, b"key", value), other
    assert sealer.check(b"key", Scattered(sealed(sealer, b"key", b"body"))).expires_at == 0


def test_an_end_is_no_end_of_a_body() -> None:
    """Whoever may write to the store cannot make a value with an end of one without, by where the body ends."""
    for sealer in SEALERS.values():
        value = sealed(sealer, b"key", b"body" + struct.pack("<Q", 1_800_000_000))
        check = value[-48:-16]
        forged = memoryview(bytearray(sealed(sealer, b"key", b"body", 1_800_000_000)))
        forged[-48:-16] = check
        assert not is_whole(sealer, b"key", forged)


def test_every_bit_counts() -> None:
    for sealer, expires_at in product(SEALERS.values(), (0, 1_800_000_000)):
        value = sealed(sealer, b"key", b"body", expires_at)
        for bit in range(len(value) * 8):
            value[bit // 8] ^= 1 << bit % 8
            assert not is_whole(sealer, b"key", value)
            value[bit // 8] ^= 1 << bit % 8
        assert is_whole(sealer, b"key", value)


def test_signed_and_unsigned_and_other_secrets_accept_nothing_of_each_other() -> None:
    sealers = [Sealer(), Sealer(b"one secret of enough bytes"), Sealer(b"two secrets of enough bytes")]
    assert len({sealer.identity for sealer in sealers}) == 3
    for author in sealers:
        value = sealed(author, b"key", b"body")
        assert [is_whole(reader, b"key", value) for reader in sealers] == [reader is author for reader in sealers]
    again = Sealer(b"one secret of enough bytes")
    assert again.identity == sealers[1].identity
    assert is_whole(again, b"key", sealed(sealers[1], b"key", b"body"))


def test_a_forger_who_knows_all_but_the_secret_cannot_sign() -> None:
    """The checksum of a changed body is anybody's to compute, under the mark of a signature, too."""
    value = sealed(SEALERS["signature"], b"key", b"body")
    value[:4] = b"evil"
    value[4 + 16 : 4 + 48] = xxhash.xxh3_128(b"key" + b"evil").digest() + bytes(16)
    assert not is_whole(SEALERS["signature"], b"key", value)


def test_what_is_shorter_than_an_envelope_is_not_whole() -> None:
    for sealer in SEALERS.values():
        for size in range(ENVELOPE_BYTES + 1):
            assert not is_whole(sealer, b"key", memoryview(bytes(size)))


@pytest.mark.parametrize("kind", SEALERS)
def test_a_value_that_comes_in_parts_and_comes_anew_is_judged_by_what_is_in_the_buffer_at_last(kind: str) -> None:
    sealer, rng = SEALERS[kind], random.Random(3)
    for size in (1, 100, 5000):
        value = sealed(sealer, b"key", rng.randbytes(size))
        buffer = memoryview(bytearray(len(value)))
        check = sealer.check(b"key", Scattered(buffer))
        for attempt, content in enumerate((rng.randbytes(len(value)), bytes(value))):
            stops = sorted(rng.sample(range(1, len(value)), 3))
            for start, stop in pairwise([0, *stops, *([len(value)] if attempt else [])]):
                buffer[start:stop] = content[start:stop]
                check.arrived(stop)
        assert check.is_whole()
        late = sealer.check(b"key", Scattered(buffer))
        late.arrived(len(buffer) // 2)  # nobody tells of the rest
        assert late.is_whole()
        buffer[0] ^= 1
        assert not sealer.check(b"key", Scattered(buffer)).is_whole()
