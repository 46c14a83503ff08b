"""Counter-based randomness: Threefry4x32-13 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3",
SC'11), vectorised. There is no generator state, so any engine can continue any request.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
_PARITY = np.uint32(0x1BD11BDA)
_ROUNDS = 13
_BLOCK, _LANES = 64, 16  # tokens whose words come from so many counters

Words = NDArray[np.uint32]


def threefry4x32(counter: Sequence[Words], key: Sequence[Words]) -> list[Words]:
    """Four words per element, a bijection of the counter's four under the key's four; arrays broadcast."""
    keys = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ _PARITY]
    x = [word.copy() for word in np.broadcast_arrays(*(word + own for word, own in zip(counter, key, strict=True)))]
    carried = np.empty_like(x[0])
    for i in range(_ROUNDS):
        for at, by in zip((0, 2), _ROTATIONS[i % 8], strict=True):
            one, other = x[at], x[3 - at if i % 2 else at + 1]
            one += other
            np.right_shift(other, np.uint32(32 - by), out=carried)
            other <<= np.uint32(by)
            other |= carried
            other ^= one
        if i % 4 == 3:
            for j, word in enumerate(x):
                word += keys[(j + i // 4 + 1) % 5]
            x[3] += np.uint32(i // 4 + 1)
    return x


class Draws:
    """Numbers for rows of logits: each token has a number u in (0, 1), of (seed, choice, position, token) alone.

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
        counters = np.arange(num_blocks * _LANES).reshape(num_blocks, _LANES)
        words = np.stack(_words(counters, 0, self._key[:, :, None, None]), axis=-2)
        return words.reshape(-1, num_blocks * _BLOCK)[:, :vocab_size]

    def uniforms(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """u of tokens[i] in row rows[i], (m,)."""
        counters, which = tokens // _BLOCK * _LANES + tokens % _LANES, tokens // _LANES % 4
        words = (np.choose(which, _words(counters, level, self._key[:, rows])) for level in (0, 1))
        high, low = (word.astype(np.uint64) for word in words)
        return (((high << np.uint64(20)) | (low >> np.uint64(12))).astype(np.float64) + 0.5) * 2.0**-52


def _words(counters: NDArray[np.int64], level: int, key: Words) -> list[Words]:
    """`key` is of four words."""
    rest = np.array([level, 0, 0], np.uint32)
    return threefry4x32([counters.astype(np.uint32), *rest], list(key))
