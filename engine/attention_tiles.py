"""Cutting a step into query tiles and grouping tiles of like size into buckets. Pure numpy."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.engine.batch import IntArray, StepInputs

_MAX_TILE = 128
"""Queries per tile: more would compute more of the causal triangle that is masked, fewer would gather KV more often."""

_TILE_SIZES = np.array([1, 2, 4, 8, 12, 16, 24, 32, 48, 64])
"""Short tiles are padded to one of these, so that many short prompts share buckets; longer ones keep their size."""

_BUCKET_BYTES = 4 << 20
"""Gathered KV, and scores, of one bucket. Both stay in a last-level cache."""

_WASTE_BYTES = 512 << 10
"""Gathering this much padding costs as much as the calls of one more bucket."""

_WASTE_RATIO = 0.1

_QUERIES_PER_GATHER = 5
"""So many queries per tile cost as much in products and softmax as the gathering of their keys does."""


class AttentionLimits:
    """What tiles and buckets are sized by: this rank's heads, the head size and the bytes of a number."""

    def __init__(self, num_heads: int, kv_heads: int, head_size: int, dtype_bytes: int) -> None:
        self.kv_token_bytes = 2 * kv_heads * head_size * dtype_bytes
        self.score_bytes = num_heads * dtype_bytes  # of one query and one key

    def tile_sizes(self, seq_lens: IntArray) -> IntArray:
        """Most queries per tile for contexts of these lengths; at least 8, so that KV is not read for every token."""
        sizes: IntArray = np.clip(_BUCKET_BYTES // (self.score_bytes * seq_lens), 8, _MAX_TILE)
        return sizes

    def tiles_per_bucket(self, tile_size: int, seq_len: int) -> int:
        """How many tiles over `seq_len` keys fit a bucket; at least one."""
        largest = max(self.kv_token_bytes, self.score_bytes * tile_size) * seq_len
        return max(1, _BUCKET_BYTES // largest)


class Bucket(NamedTuple):
    """B tiles, each padded to Q queries and K blocks. Padded queries repeat their tile's last one."""

    slots: IntArray  # (B,)
    seq_lens: IntArray  # (B,) keys that the tile's last query sees
    positions: IntArray  # (B, Q) of each query in its request
    qkv_rows: IntArray  # (B, Q) of each query in the step
    out_rows: IntArray  # (B, Q) where its output goes
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


class TilePlan(NamedTuple):
    """All buckets of a step; their real queries are the rows [0, num_rows), each once."""

    buckets: list[Bucket]
    num_rows: int


class _Tiles(NamedTuple):
    """One entry per tile."""

    slots: IntArray
    starts: IntArray  # first query's row in the step
    outs: IntArray  # first query's row in the output
    positions: IntArray  # first query's position
    counts: IntArray  # queries
    padded: IntArray  # queries after padding
    blocks: IntArray  # blocks that hold the keys


def plan_tiles(inputs: StepInputs, rows: IntArray | None, block_size: int, limits: AttentionLimits) -> TilePlan:
    """Tiles for all of the step's tokens, or for the tokens `rows` (ascending) only."""
    num_rows = len(inputs.positions) if rows is None else len(rows)
    tiles = _cut(inputs, limits) if rows is None else _single(inputs, rows)
    sizes = tiles.counts
    padded = np.where(
        sizes > _TILE_SIZES[-1],
        sizes,
        _TILE_SIZES[np.minimum(np.searchsorted(_TILE_SIZES, sizes), len(_TILE_SIZES) - 1)],
    )
    blocks = -(-(tiles.positions + sizes) // block_size)
    order = np.lexsort((-blocks, padded))
    tiles = _Tiles(*(column[order] for column in tiles._replace(padded=padded, blocks=blocks)))
    buckets, start = [], 0
    while start < len(order):
        stop = _bucket_end(tiles, start, block_size, limits)
        buckets.append(_bucket(tiles, slice(start, stop)))
        start = stop
    return TilePlan(buckets, num_rows)


def _cut(inputs: StepInputs, limits: AttentionLimits) -> _Tiles:
    """Every request's tokens in tiles of equal size, the last one shorter."""
    scheduled = np.diff(inputs.cu_seqlens_q)
    sizes = limits.tile_sizes(inputs.seq_lens)
    per_request = -(-scheduled // sizes)
    request = np.repeat(np.arange(len(scheduled)), per_request)
    number = np.arange(len(request)) - np.repeat(np.cumsum(per_request) - per_request, per_request)
    skipped = number * sizes[request]
    starts = inputs.cu_seqlens_q[:-1][request] + skipped
    counts = np.minimum(sizes[request], scheduled[request] - skipped)
    positions = (inputs.seq_lens - scheduled)[request] + skipped
    return _Tiles(inputs.slots[request], starts, starts, positions, counts, counts, counts)


def _single(inputs: StepInputs, rows: IntArray) -> _Tiles:
    """A tile for each run of adjacent rows would be rare: single rows are the last tokens of requests."""
    request = np.searchsorted(inputs.cu_seqlens_q, rows, side="right") - 1
    ones = np.ones(len(rows), dtype=np.int64)
    return _Tiles(inputs.slots[request], rows, np.arange(len(rows)), inputs.positions[rows], ones, ones, ones)


def _bucket_end(tiles: _Tiles, start: int, block_size: int, limits: AttentionLimits) -> int:
    """Where the bucket that begins with tile `start` ends. Tiles are sorted by padded size, longest context first."""
    size, blocks = int(tiles.padded[start]), int(tiles.blocks[start])
    most = limits.tiles_per_bucket(size, blocks * block_size)
    own = np.cumsum(tiles.blocks[start : start + most])
    waste = blocks * np.arange(1, len(own) + 1) - own
    slack = _WASTE_BYTES / (limits.kv_token_bytes * block_size * (1 + size / _QUERIES_PER_GATHER))
    fits = (tiles.padded[start : start + most] == size) & (waste <= np.maximum(_WASTE_RATIO * own, slack))
    return start + (len(own) if fits.all() else int(fits.argmin()))


def _bucket(tiles: _Tiles, part: slice) -> Bucket:
    counts = tiles.counts[part][:, None]
    steps = np.minimum(np.arange(tiles.padded[part.start])[None, :], counts - 1)
    return Bucket(
        slots=tiles.slots[part],
        seq_lens=tiles.positions[part] + tiles.counts[part],
        positions=tiles.positions[part][:, None] + steps,
        qkv_rows=tiles.starts[part][:, None] + steps,
        out_rows=tiles.outs[part][:, None] + steps,
        real=np.arange(steps.shape[1])[None, :] < counts,
        num_blocks=int(tiles.blocks[part].max()),
    )
