"""The counter-based generator against published vectors, a scalar version of itself and the uniform distribution."""

import numpy as np
import pytest

from pdkv.engine.worker.sampling.randomness import philox4x32, uniforms


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([v], np.uint64) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known answers for philox4x32, 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    result = philox4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in result) == expected


def scalar_uniform(seed: int, choice: int, position: int) -> float:
    c = [position & 0xFFFFFFFF, position >> 32, choice, 0]
    k = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return ((c[0] >> 5) * 2**26 + (c[1] >> 6)) / 2**53


def test_uniforms_equal_a_scalar_computation() -> None:
    seeds = [0, 1, 2**63 - 1, (-1) % 2**64, (-(2**63)) % 2**64, 1234567890123]
    triples = [(s, c, p) for s in seeds for c in (0, 1, 127) for p in (0, 1, 5000)]
    columns = [np.array(column, np.uint64) for column in zip(*triples, strict=True)]
    assert uniforms(*columns).tolist() == [scalar_uniform(*triple) for triple in triples]


@pytest.mark.parametrize("varying", ["seed", "choice", "position"])
def test_each_argument_alone_gives_uniform_numbers(varying: str) -> None:
    count = 50_000
    fixed, running = np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint64)
    numbers = uniforms(*(running if name == varying else fixed for name in ("seed", "choice", "position")))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    observed = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((observed - count / 100) ** 2 / (count / 100)).sum() < 148.2  # chi-square, 99 degrees, 99.9 %
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(count)
