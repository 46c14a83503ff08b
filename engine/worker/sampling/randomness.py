"""Counter-based randomness: Threefry4x32-13 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3",
SC'11), vectorised. There is no generator state, so any engine can continue any request.
"""

import numpy as np
from numpy.typing import NDArray

_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
_PARITY = np.uint32(0x1BD11BDA)
_ROUNDS = 13
_BLOCK, _LANES = 64, 16  # tokens whose words come from so many counters

Words = NDArray[np.uint32]


def threefry4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words, Words, Words]) -> list[Words]:
    """Four words per element, a bijection of the counter under the key; arrays broadcast."""
    keys = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ _PARITY]
    x = [word.copy() for word in np.broadcast_arrays(*(word + own for word, own in zip(counter, key, strict=True)))]
    carried = np.empty_like(x[0])
    for i in range(_ROUNDS):
        others = (1, 3) if i % 2 == 0 else (3, 1)
        for at, other, by in zip((0, 2), others, _ROTATIONS[i % 8], strict=True):
            x[at] += x[other]
            np.right_shift(x[other], np.uint32(32 - by), out=carried)
            x[other] <<= np.uint32(by)
            x[other] |= carried
            x[other] ^= x[at]
        if i % 4 == 3:
            number = i // 4 + 1
            for j, word in enumerate(x):
                word += keys[(j + number) % 5]
            x[3] += np.uint32(number)
    return x


class Draws:
    """Of rows of logits: each token of each row has a number u in (0, 1), of (seed, choice, position, token) alone.

    u is (b + 1/2) / 2**52. The higher 32 bits of b are word t // 16 % 4 of Threefry's under the key (seed's lower and
    higher half, choice, position) at the counter (t // 64 * 16 + t % 16, 0, 0, 0), where t is the token. The lower 20
    are the highest of the same word at the counter that has a 1 behind that: few races need them.
    """

    def __init__(self, seeds: NDArray[np.uint64], choices: NDArray[np.uint64], positions: NDArray[np.uint64]) -> None:
        """(n,) each: 64-bit seeds (two's complement of negative ones); choice index of the request and index of the
        token in its output, below 2**32.
        """
        halves = seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)
        self._key = np.stack([*halves, choices, positions]).astype(np.uint32)

    def leading_words(self, vocab_size: int) -> Words:
        """The words that are the higher bits of b, (n, vocab_size)."""
        num_blocks = -(-vocab_size // _BLOCK)
        words = np.stack(self._words(np.arange(num_blocks * _LANES).reshape(num_blocks, _LANES), 0, slice(None)), -2)
        return words.reshape(-1, num_blocks * _BLOCK)[:, :vocab_size]

    def uniforms(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """u of tokens[i] in row rows[i], (m,)."""
        counters = tokens // _BLOCK * _LANES + tokens % _LANES
        high, low = (
            np.choose(tokens // _LANES % 4, self._words(counters, level, rows)).astype(np.uint64) for level in (0, 1)
        )
        return (((high << np.uint64(20)) | (low >> np.uint64(12))).astype(np.float64) + 0.5) * 2.0**-52

    def _words(self, counters: NDArray[np.int64], level: int, rows: NDArray[np.int64] | slice) -> list[Words]:
        """Of each counter; of each of them for each row where `rows` is a slice."""
        first, second, third, fourth = self._key[:, rows]
        if isinstance(rows, slice):
            first, second, third, fourth = self._key.reshape(*self._key.shape, *[1] * counters.ndim)
        zeros = np.zeros(1, np.uint32)
        counter = counters.astype(np.uint32), zeros + np.uint32(level), zeros, zeros
        return threefry4x32(counter, (first, second, third, fourth))
