"""The digest of `digest.py` in Triton, for KV in device memory: one program per unit and KV head."""

from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl

from pdkv.kernels import digest
from pdkv.kernels.triton_jit import LAUNCH_OPTIONS, jit

_DELTA = tl.constexpr(digest.DELTA)
_LENGTH = tl.constexpr(digest.LENGTH)
_MIX_1 = tl.constexpr(digest.MIX_1)
_MIX_2 = tl.constexpr(digest.MIX_2)


@jit()
def _digest_kernel(
    pool: tl.tensor,  # words, from the part's first row in block 0 on
    offsets: tl.tensor,  # words from there to each unit's
    words: tl.tensor,  # of each of a unit's rows, so many are digested
    seeds: tl.tensor,  # (sides, heads)
    constants: tl.tensor,  # keys, lanes: 8 each
    digests: tl.tensor,  # (n, heads); written
    stride_side: tl.tensor,
    stride_head: tl.tensor,
    num_sides: tl.tensor,  # K and V of each layer
    STRIPES: tl.constexpr,  # at least those of a row
) -> None:
    unit = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1)
    num_words = tl.load(words + unit)
    stripe = tl.arange(0, STRIPES)
    lane = tl.arange(0, 8)
    place = stripe[:, None] * 8 + lane[None, :]
    neighbour = stripe[:, None] * 8 + (lane ^ 1)[None, :]
    keys = tl.load(constants + lane).to(tl.uint64)[None, :] + stripe.to(tl.uint64)[:, None] * _DELTA
    lanes = tl.load(constants + 8 + lane).to(tl.uint64)
    used = (stripe * 8 < num_words)[:, None]
    row = pool + tl.load(offsets + unit) + head * stride_head
    seed = seeds + head
    total = tl.full([], 0, dtype=tl.uint64)
    for _ in range(num_sides):
        x = tl.load(row + place, mask=place < num_words, other=0).to(tl.uint64) ^ keys
        near = tl.load(row + neighbour, mask=neighbour < num_words, other=0).to(tl.uint64)
        products = tl.where(used, (x & 0xFFFFFFFF) * (x >> 32), 0)
        sums = tl.sum(products + near, axis=0)
        sums = (sums ^ (sums >> 29)) * lanes
        value = tl.sum(sums, axis=0) + num_words.to(tl.uint64) * 8 * _LENGTH
        value = value ^ tl.load(seed).to(tl.uint64)
        value = (value ^ (value >> 33)) * _MIX_1
        value = (value ^ (value >> 29)) * _MIX_2
        total += value ^ (value >> 32)
        row += stride_side
        seed += num_heads
    tl.store(digests + unit * num_heads + head, total.to(tl.int64))


@lru_cache(maxsize=64)
def _constants(device: torch.device) -> torch.Tensor:
    """(16,) int64: those of the words, and those of the lanes. They are there when this returns, for all streams."""
    return torch.from_numpy(np.array(digest.KEYS + digest.LANES, dtype=np.uint64).view(np.int64)).to(device)


def digests_triton(
    pool: torch.Tensor,
    offsets: torch.Tensor,
    words: torch.Tensor,
    seeds: torch.Tensor,
    strides: tuple[int, int],
    most_words: int,
) -> torch.Tensor:
    """The digests of units of a pool, (n, heads) int64.

    Args:
        pool: int64 words, flat, on the device.
        offsets: (n,) int64, where each unit's first row begins.
        words: (n,) int64, number of words of each of a unit's rows that are digested.
        seeds: (sides, heads) int64, contiguous.
        strides: from one side of a layer to the next, and from head to head.
        most_words: words of a whole row, for which the kernel is compiled.
    """
    num_sides, num_heads = seeds.shape
    digests = torch.empty((offsets.shape[0], num_heads), dtype=torch.int64, device=pool.device)
    if not digests.numel():
        return digests
    _digest_kernel[digests.shape](
        pool, offsets, words, seeds, _constants(pool.device), digests, *strides, num_sides,
        STRIPES=triton.next_power_of_2(-(-most_words // digest.STRIPE_WORDS)),
        **LAUNCH_OPTIONS,
    )  # fmt: skip
    return digests
