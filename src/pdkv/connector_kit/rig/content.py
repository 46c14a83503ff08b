"""The KV content that the kit writes: like a model's, a function of the text up to a token, with distinct values."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.wire.kv import KVLayout

Values = npt.NDArray[np.int32]

CANARY = 0x2A5A5A5A
"""Initial content of a pool."""

GARBAGE = 0x15151515
"""Content that another request writes into a freed block."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ODD = 0xBF58476D1CE4E5B9


class Piece(NamedTuple):
    """Tokens up to `stop`, drawn from `seed`. Texts that begin with equal pieces have equal KV there."""

    seed: int
    stop: int


Text = Sequence[Piece]


def _mix(number: int) -> int:
    number = (number + _GOLDEN) & _MASK
    number = ((number ^ (number >> 30)) * _ODD) & _MASK
    return number ^ (number >> 31)


def token_values(text: Text, start: int, stop: int) -> npt.NDArray[np.uint64]:
    """One 64-bit number for each of the tokens [start, stop), which depends on all tokens before it."""
    parts = []
    chain, first = 0, 0
    for seed, end in text:
        chain = _mix(chain ^ seed)
        low, high = max(first, start), min(end, stop)
        if low < high:
            parts.append(np.uint64(chain) + np.arange(low, high, dtype=np.uint64) * np.uint64(_GOLDEN))
        chain, first = _mix(chain ^ end), end
    assert first >= stop, f"a text of {first} tokens has no token {stop - 1}"
    values = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)
    return values ^ (values >> np.uint64(29))


def token_ids(text: Text, num_tokens: int) -> list[int]:
    """The text's token ids."""
    ids: list[int] = (token_values(text, 0, num_tokens) % np.uint64(50_000)).tolist()
    return ids


def kv_values(text: Text, start: int, stop: int, layout: KVLayout, heads: Sequence[int]) -> Values:
    """KV of tokens [start, stop): (tokens, layers, sides, heads, head_size) as the bit patterns of finite float32."""
    tokens = token_values(text, start, stop)
    total = layout.kv_heads_of_all_ranks
    shape = (len(layout.places), layout.sides, total, layout.head_size)  # layers of the model
    index = np.arange(math.prod(shape), dtype=np.uint64).reshape(shape)[:, :, list(heads)]
    values = tokens[:, None, None, None, None] * np.uint64(_ODD) + index * np.uint64(_GOLDEN)
    values ^= values >> np.uint64(31)
    values *= np.uint64(_ODD)
    return (values >> np.uint64(34)).astype(np.int32)


def describe_difference(actual: Values, expected: Values, start: int, heads: Sequence[int]) -> str:
    """The differing values, in words; empty if there are none. Shapes as `kv_values` returns them."""
    wrong = np.argwhere(actual != expected)
    if not len(wrong):
        return ""
    tokens, layers, kinds, head, _ = (sorted(set(column.tolist())) for column in wrong.T)
    what = "K and V" if len(kinds) == 2 else ("K", "V")[kinds[0]]
    return (
        f"{len(wrong)} of {expected.size} values are wrong: tokens {_ranges([start + t for t in tokens])} "
        f"(of [{start}, {start + len(expected)})), layers {_ranges(layers)}, {what}, "
        f"KV heads {_ranges([heads[h] for h in head])}"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in spans[:6]]
    return ", ".join(shown) + (", …" if len(spans) > 6 else "")
