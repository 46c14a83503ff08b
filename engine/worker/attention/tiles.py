"""Cutting a step into query tiles and grouping tiles of like size into buckets. Pure numpy."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.engine.worker.attention.shapes import round_blocks, round_queries, round_tiles
from pdkv.engine.worker.batch import IntArray, StepInputs

_FULL_TILES: IntArray = np.array([8, 16, 32, 64, 128])
"""Queries per tile: more would compute more of the masked part of the causal triangle, fewer would gather KV more
often.
"""

_BUCKET_BYTES = 4 << 20
"""Bytes of one bucket's gathered KV, and of its scores. Both stay in a last-level cache."""

_WASTE_BYTES = 512 << 10
"""Bytes of padding that cost as much to gather as the calls of one more bucket."""

_WASTE_RATIO = 0.1

_PADDED_QUERIES = np.array([0, *(round_queries(count) for count in range(1, int(_FULL_TILES[-1]) + 1))])

_QUERIES_PER_GATHER = 5
"""Queries per tile that cost as much in products and softmax as gathering their keys."""


class AttentionLimits:
    """The sizes that determine tiles and buckets: this rank's heads, the head size and the bytes of a number."""

    def __init__(self, num_heads: int, kv_heads: int, head_size: int, dtype_bytes: int) -> None:
        self.kv_token_bytes = 2 * kv_heads * head_size * dtype_bytes
        self.score_bytes = num_heads * dtype_bytes  # of one query and one key

    def tile_sizes(self, seq_lens: IntArray) -> IntArray:
        """Queries per tile for contexts of these lengths: as many as the scores allow, but at least 8, or KV would be
        read for every token.
        """
        fits = _BUCKET_BYTES // (self.score_bytes * seq_lens)
        return _FULL_TILES[np.maximum(np.searchsorted(_FULL_TILES, fits, side="right") - 1, 0)]

    def tiles_per_bucket(self, tile_size: int, seq_len: int) -> int:
        """The number of tiles over `seq_len` keys that fit a bucket; at least one."""
        largest = max(self.kv_token_bytes, self.score_bytes * tile_size) * seq_len
        return max(1, _BUCKET_BYTES // largest)


class Bucket(NamedTuple):
    """B tiles of Q queries and K blocks. Padding repeats a tile's last query, and the last tile.

    Positions and lengths count from a tile's first block, which with a window may be later than its request's.
    """

    slots: IntArray  # (B,)
    first_blocks: IntArray  # (B,) blocks of the request that no query of the tile sees
    seq_lens: IntArray  # (B,) up to the last key that the tile's last query sees
    positions: IntArray  # (B, Q) of each query
    qkv_rows: IntArray  # (B, Q) of each query in the step
    out_rows: IntArray  # (B, Q) row of its output
    real: npt.NDArray[np.bool_]  # (B, Q) not padding
    num_blocks: int  # K

    @property
    def tile_size(self) -> int:
        """Q."""
        return int(self.positions.shape[1])

    @property
    def num_queries(self) -> int:
        """B * Q."""
        return int(self.positions.size)


class Singles(NamedTuple):
    """Tiles of one query, left out of the buckets; one entry each."""

    slots: IntArray
    qkv_rows: IntArray  # of each query in the step
    out_rows: IntArray  # row of its output
    first_blocks: IntArray  # blocks of the request that it does not see
    seq_lens: IntArray  # keys from there on, up to its own
    hidden: IntArray  # number of the first of those that it does not see, either; less than a block

    @classmethod
    def at(
        cls, slots: IntArray, rows: IntArray, outs: IntArray, positions: IntArray, block_size: int, window: int | None
    ) -> "Singles":
        """Singles for queries in the step's rows `rows` at `positions`; `outs` are the rows of their outputs."""
        if window is None:
            nothing = np.zeros_like(positions)
            return cls(slots, rows, outs, nothing, positions + 1, nothing)
        skipped = np.maximum(positions + 1 - window, 0) // block_size
        seen = positions + 1 - skipped * block_size
        return cls(slots, rows, outs, skipped, seen, np.maximum(seen - window, 0))


class TilePlan(NamedTuple):
    """A step's queries are the rows [0, num_rows), each once, in a bucket or single."""

    buckets: list[Bucket]
    singles: Singles
    num_rows: int


class _Tiles(NamedTuple):
    """One entry per tile."""

    slots: IntArray
    starts: IntArray  # first query's row in the step
    outs: IntArray  # first query's row in the output
    positions: IntArray  # first query's position
    counts: IntArray  # queries
    padded: IntArray  # queries after padding
    skipped: IntArray  # blocks that no query sees; positions count from after them
    blocks: IntArray  # blocks that hold the keys


def plan_tiles(
    inputs: StepInputs,
    rows: IntArray | None,
    block_size: int,
    limits: AttentionLimits,
    *,
    window: int | None = None,
    singles_apart: bool = False,
) -> TilePlan:
    """Tiles for all of the step's tokens, or for the tokens `rows` (ascending) only.

    Args:
        window: keys that each query sees, including its own; None: all up to its own.
        singles_apart: whether single queries are left out of the buckets.
    """
    num_rows = len(inputs.positions) if rows is None else len(rows)
    tiles = _cut(inputs, limits, window) if rows is None else _single(inputs, rows)
    single = (tiles.counts == 1) & singles_apart
    only_singles = bool(single.all())
    apart = tiles if only_singles else _Tiles(*(column[single] for column in tiles))
    singles = Singles.at(apart.slots, apart.starts, apart.outs, apart.positions, block_size, window)
    if only_singles:
        return TilePlan([], singles, num_rows)
    tiles = _Tiles(*(column[~single] for column in tiles))
    if window is not None:
        skipped = np.maximum(tiles.positions + 1 - window, 0) // block_size
        tiles = tiles._replace(skipped=skipped, positions=tiles.positions - skipped * block_size)
    padded = _PADDED_QUERIES[tiles.counts]
    blocks = -(-(tiles.positions + tiles.counts) // block_size)
    order = np.lexsort((-blocks, padded))
    tiles = _Tiles(*(column[order] for column in tiles._replace(padded=padded, blocks=blocks)))
    buckets, start = [], 0
    while start < len(order):
        num_blocks = round_blocks(int(tiles.blocks[start]), block_size)
        count, size = _bucket_size(tiles, start, num_blocks, block_size, limits)
        buckets.append(_bucket(tiles, start + np.minimum(np.arange(size), count - 1), count, num_blocks))
        start += count
    return TilePlan(buckets, singles, num_rows)


def _cut(inputs: StepInputs, limits: AttentionLimits, window: int | None) -> _Tiles:
    """Cut every prompt's tokens into tiles of equal size, the last one shorter, and each output token into its own.

    So tokens computed again, as after a death or a preemption, are identical to the bit: those of the prompt in tiles,
    those of the output one by one.
    """
    scheduled = np.diff(inputs.cu_seqlens_q)
    if len(inputs.positions) == len(scheduled):  # one token each, as in most steps
        return _single(inputs, np.arange(len(scheduled)))
    num_computed = inputs.seq_lens - scheduled
    num_prompt = np.clip(inputs.num_prompt - num_computed, 0, scheduled)  # of these
    num_keys = num_computed + num_prompt
    most_keys = None if window is None else window + int(_FULL_TILES[-1])
    sizes = limits.tile_sizes(np.maximum(num_keys if most_keys is None else np.minimum(num_keys, most_keys), 1))
    num_tiles = -(-num_prompt // sizes)
    per_request = num_tiles + scheduled - num_prompt
    request = np.repeat(np.arange(len(scheduled)), per_request)
    number = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    behind = np.maximum(number - num_tiles[request], 0)  # of the output
    in_prompt, size = number < num_tiles[request], sizes[request]
    skipped = np.where(in_prompt, number * size, num_prompt[request] + behind)
    starts = inputs.cu_seqlens_q[:-1][request] + skipped
    counts = np.where(in_prompt, np.minimum(size, num_prompt[request] - skipped), 1)
    positions = num_computed[request] + skipped
    return _Tiles(inputs.slots[request], starts, starts, positions, counts, counts, np.zeros_like(counts), counts)


def _single(inputs: StepInputs, rows: IntArray) -> _Tiles:
    """One tile per row, since runs of adjacent rows would be rare: single rows are the last tokens of requests."""
    request = np.searchsorted(inputs.cu_seqlens_q, rows, side="right") - 1
    ones = np.ones(len(rows), dtype=np.int64)
    positions, outs = inputs.positions[rows], np.arange(len(rows))
    return _Tiles(inputs.slots[request], rows, outs, positions, ones, ones, np.zeros_like(ones), ones)


def _bucket_size(
    tiles: _Tiles, start: int, num_blocks: int, block_size: int, limits: AttentionLimits
) -> tuple[int, int]:
    """(tiles, tiles with padding) of the bucket that begins with tile `start`.

    Tiles are sorted by padded size, the longest context first.
    """
    queries = int(tiles.padded[start])
    most, _ = round_tiles(limits.tiles_per_bucket(queries, num_blocks * block_size))
    own = np.cumsum(tiles.blocks[start : start + most])
    waste = num_blocks * np.arange(1, len(own) + 1) - own
    slack = _WASTE_BYTES / (limits.kv_token_bytes * block_size * (1 + queries / _QUERIES_PER_GATHER))
    fits = (tiles.padded[start : start + most] == queries) & (waste <= np.maximum(_WASTE_RATIO * own, slack))
    count = len(own) if fits.all() else max(1, int(fits.argmin()))
    fewer, more = round_tiles(count)
    if (more - count) * num_blocks <= slack:
        return count, more
    return fewer, fewer


def _bucket(tiles: _Tiles, index: IntArray, count: int, num_blocks: int) -> Bucket:
    """The bucket of the tiles `index`, of which the first `count` are real."""
    counts = tiles.counts[index][:, None]
    queries = np.arange(tiles.padded[index[0]])[None, :]
    steps = np.minimum(queries, counts - 1)
    return Bucket(
        slots=tiles.slots[index],
        first_blocks=tiles.skipped[index],
        seq_lens=tiles.positions[index] + tiles.counts[index],
        positions=tiles.positions[index][:, None] + steps,
        qkv_rows=tiles.starts[index][:, None] + steps,
        out_rows=tiles.outs[index][:, None] + steps,
        real=(queries < counts) & (np.arange(len(index)) < count)[:, None],
        num_blocks=num_blocks,
    )
