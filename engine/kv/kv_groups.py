"""KV groups: which layers share blocks, and which blocks of a request each group needs. Plain arithmetic.

A group's layers all attend to every token (window 0) or all to the same window of tokens. All groups have the same
number of layers, so that any group can use any block of the pool (docs/kv-groups.md).
"""

from collections.abc import Sequence

from pdkv.connectors.transfer.planning import first_seen_block
from pdkv.wire.kv import KVGroup

MAX_UNUSED = 1 / 8
"""Share of a model's layers that may stay unused in blocks to have fewer groups."""

STEPS_AHEAD = 3
"""Steps that may be planned before the first of them is confirmed, for which a window's old blocks are kept."""


def make_groups(windows: Sequence[int | None]) -> tuple[int, tuple[KVGroup, ...]]:
    """Divide a model's layers into groups.

    Args:
        windows: for each layer, the number of tokens that a query attends to, including its own; None: all.

    Returns:
        The number of layers in a block, and the groups, those without a window first; no groups if no layer has a
        window.
    """
    layers: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window or 0, []).append(layer)
    if set(layers) == {0}:
        return len(windows), ()
    size = _group_size([len(own) for own in layers.values()])
    groups = [
        KVGroup(tuple(own[first : first + size]), window)
        for window, own in sorted(layers.items())
        for first in range(0, len(own), size)
    ]
    return size, tuple(groups)


def _group_size(counts: Sequence[int]) -> int:
    """The most layers per block that leave few unused, given the number of layers of each window."""
    most = (1 + MAX_UNUSED) * sum(counts)
    return next(size for size in range(max(counts), 0, -1) if sum(-(-n // size) * size for n in counts) <= most)


def kept_from(num_tokens: int, hit_tokens: int) -> int:
    """The index of the token whose context must stay in blocks once the first `num_tokens` tokens are computed.

    A store's hits end at multiples of `hit_tokens` (0: there is no store). The last hit that a prompt of `num_tokens`
    can use leaves one token to compute.
    """
    return max(num_tokens - 1, 0) // hit_tokens * hit_tokens if hit_tokens else num_tokens


def num_held_at_once(
    windows: Sequence[int], num_tokens: int, block_size: int, max_step_tokens: int, hit_tokens: int = 0
) -> int:
    """The most blocks, of all groups together, that a request of `num_tokens` tokens holds while it is computed.

    Args:
        max_step_tokens: tokens of one step: a window's blocks stay until the steps that read them are confirmed.
        hit_tokens: as in `kept_from`.
    """
    blocks = -(-num_tokens // block_size)
    ahead = STEPS_AHEAD * max_step_tokens + hit_tokens
    return sum(min(blocks, -(-(window - 1 + ahead) // block_size) + 1) if window else blocks for window in windows)


def num_held_at_end(windows: Sequence[int], num_tokens: int, block_size: int, hit_tokens: int = 0) -> int:
    """The number of blocks, of all groups together, that are kept after the first `num_tokens` tokens."""
    blocks, seen = -(-num_tokens // block_size), kept_from(num_tokens, hit_tokens)
    return sum(blocks - first_seen_block(window, seen, block_size) for window in windows)
