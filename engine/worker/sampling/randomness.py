"""Counter-based randomness: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3",
SC'11), vectorised. There is no generator state, so any engine can continue any request.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]
"""32-bit words, each held in 64 bits so that a product of two does not overflow."""


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, ...]:
    """Four 32-bit words per element, a bijection of the counter under the key; all arrays (n,)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Words, choices: Words, positions: Words) -> NDArray[np.float64]:
    """One uniform in [0, 1) per element with 53 random bits, a pure function of (seed, choice, output position).

    Args:
        seeds: (n,) 64-bit seeds (two's complement of a negative one).
        choices: (n,) choice index of the request, below 2**32.
        positions: (n,) index of the token in the request's output.
    """
    counter = (positions & _LOW, positions >> _HALF, choices, np.zeros_like(choices))
    high, low, _, _ = philox4x32(counter, (seeds & _LOW, seeds >> _HALF))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return bits.astype(np.float64) * 2.0**-53
