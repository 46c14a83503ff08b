"""The counter-based generator against published vectors, a scalar version of itself and the uniform distribution."""

import numpy as np
import pytest
from reference_sampler import uniform

from pdkv.engine.worker.sampling.randomness import Draws, threefry4x32


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([v], np.uint32) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123's known answers for threefry4x32, 13 rounds
        ((0, 0, 0, 0), (0, 0, 0, 0), (0x531C7E4F, 0x39491EE5, 0x2C855A92, 0x3D6ABF9A)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 4, (0xC4189358, 0x1C9CC83A, 0xD5881C67, 0x6A0A89E0)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89),
            (0x4AA71D8F, 0x734738C2, 0x431FC6A8, 0xAE6DEBF1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    result = threefry4x32(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word[0]) for word in result) == expected


def draws(seeds: object, choices: object, positions: object) -> Draws:
    return Draws(*(np.array(column, np.uint64) for column in (seeds, choices, positions)))


def test_uniforms_equal_a_scalar_computation() -> None:
    seeds = [0, 1, 2**63 - 1, (-1) % 2**64, (-(2**63)) % 2**64, 1234567890123]
    triples = [(s, c, p) for s in seeds for c in (0, 1, 127) for p in (0, 5000, 2**32 - 1)]
    own = draws(*zip(*triples, strict=True))
    tokens = np.array([0, 15, 16, 63, 64, 130, 151_935])
    rows = np.repeat(np.arange(len(triples)), len(tokens))
    found = own.uniforms(rows, np.tile(tokens, len(triples))).reshape(len(triples), -1)
    assert found.tolist() == [[uniform(*triple, token) for token in tokens.tolist()] for triple in triples]
    leading = own.leading_words(131)[:, tokens[:-1]]
    assert leading.tolist() == np.floor(found[:, :-1] * 2.0**32).tolist()


@pytest.mark.parametrize("varying", ["seed", "choice", "position", "token"])
def test_each_argument_alone_gives_uniform_numbers(varying: str) -> None:
    count = 50_000
    fixed, running = np.full(count, 7, np.uint64), np.arange(count, dtype=np.uint64)
    own = draws(*(running if name == varying else fixed for name in ("seed", "choice", "position")))
    numbers = own.uniforms(np.arange(count), (running if varying == "token" else fixed).astype(np.int64))
    assert numbers.min() > 0.0
    assert numbers.max() < 1.0
    observed = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((observed - count / 100) ** 2 / (count / 100)).sum() < 148.2  # chi-square, 99 degrees, 99.9 %
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(count)
