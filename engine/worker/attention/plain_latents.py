"""Prompts over latent KV: keys and values are made of the latents once, and attended to as any others.

Products with keys of the latents' size, as outputs have, would take several times as many operations for prompts.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pdkv.engine.worker.attention.runs import Prompts
from pdkv.engine.worker.batch import IntArray
from pdkv.models.latent_heads import LatentHeads

_MOST_BYTES = 256 << 20
"""Most bytes of keys and values at a time; prompts with more in front of them are computed as outputs are."""


def worth_plain(heads: LatentHeads, counts: IntArray, lengths: IntArray) -> NDArray[np.bool_]:
    """Which prompts take fewer operations with keys and values of their own.

    Args:
        counts: queries of each.
        lengths: tokens that the last query of each sees.
    """
    (num_heads, plain, rank), value = heads.keys.shape, heads.values.shape[2]
    size = heads.queries.shape[2]
    made = rank * (plain + value)  # operations for a token and head, of making keys and values or of doing without
    saved = 2 * rank - plain - value  # for a pair of tokens
    is_worth = counts * (lengths * saved + made) >= lengths * made
    num_bytes = lengths * 2 * num_heads * size * heads.keys.element_size()
    is_worth &= np.cumsum(np.where(is_worth, num_bytes, 0)) <= _MOST_BYTES
    return is_worth if value <= size else np.zeros_like(is_worth)


def expand(heads: LatentHeads, rows: torch.Tensor) -> torch.Tensor:
    """A pool (blocks, 1, 2, heads, block_size, size) of keys and values, of latent rows (blocks, block_size, row)."""
    kv = heads.expand(rows.flatten(0, 1)).view(*rows.shape[:2], 2, *heads.queries.shape[1:])
    return kv.permute(0, 2, 3, 1, 4).contiguous().unsqueeze(1)


class PlainPrompts(NamedTuple):
    """Prompts of a step over a pool of their own, in host memory."""

    prompts: Prompts  # whose slots are of `tables`
    blocks: torch.Tensor  # (blocks,) of the engine's pool
    tables: IntArray  # (1, prompts, most blocks)
    outs: torch.Tensor  # (queries,) rows of their results

    @classmethod
    def of(cls, prompts: Prompts, tables: IntArray, block_size: int) -> "PlainPrompts":
        """`tables` (slots of all groups, max_blocks)."""
        counts = -(-(prompts.positions + prompts.counts) // block_size)
        blocks = np.concatenate([tables[slot, :count] for slot, count in zip(prompts.slots, counts, strict=True)])
        starts = np.cumsum(counts) - counts
        own = np.minimum(starts[:, None] + np.arange(counts.max()), len(blocks) - 1)
        return cls(
            prompts._replace(slots=np.arange(len(counts))),
            torch.from_numpy(blocks.astype(np.int64)),
            own[None],
            torch.from_numpy(rows_of(prompts.out_rows, prompts.counts)),
        )


def rows_of(firsts: IntArray, counts: IntArray) -> IntArray:
    """The rows of runs of `counts` rows from `firsts` on."""
    ends = np.cumsum(counts)
    rows: IntArray = np.arange(ends[-1] if len(ends) else 0) + np.repeat(firsts - ends + counts, counts)
    return rows
