"""Block ids on the wire. They are sent as runs of adjacent blocks, which keeps tickets and hand-offs small."""

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import msgspec

from pdkv.errors import MalformedMessage
from pdkv.wire.decoding import decode_total

MAX_BLOCKS = 1 << 20
"""Blocks that one message may name; more is no message of ours."""


class BlockRun(NamedTuple):
    """Blocks [first, first + num_blocks), all of that generation."""

    first: int
    num_blocks: int
    generation: int = 0


_RUNS = msgspec.msgpack.Decoder(list[BlockRun])


def make_runs(block_ids: Sequence[int], generations: Sequence[int] | None = None) -> list[BlockRun]:
    """Runs of adjacent blocks that have one generation, in the order given.

    Raises:
        ValueError: not one generation per block.
    """
    runs: list[BlockRun] = []
    first = count = generation = 0
    for block_id, version in zip(
        block_ids, repeat(0) if generations is None else generations, strict=generations is not None
    ):
        if count and block_id == first + count and version == generation:
            count += 1
            continue
        if count:
            runs.append(BlockRun(first, count, generation))
        first, count, generation = block_id, 1, version
    if count:
        runs.append(BlockRun(first, count, generation))
    return runs


def expand_runs(runs: Sequence[BlockRun]) -> tuple[list[int], list[int]] | None:
    """(block ids, generations); None: no blocks could be meant by that."""
    block_ids: list[int] = []
    generations: list[int] = []
    for first, num_blocks, generation in runs:
        if first < 0 or not 1 <= num_blocks <= MAX_BLOCKS - len(block_ids):
            return None
        if num_blocks == 1:  # an aged pool has little else, and a scheduler waits for this
            block_ids.append(first)
            generations.append(generation)
        else:
            block_ids.extend(range(first, first + num_blocks))
            generations.extend(repeat(generation, num_blocks))
    return block_ids, generations


def encode_blocks(block_ids: Sequence[int], generations: Sequence[int]) -> bytes:
    """A hand-off's payload: msgpack of the blocks' runs."""
    return msgspec.msgpack.encode(make_runs(block_ids, generations))


def decode_blocks(payload: bytes) -> tuple[list[int], list[int]] | None:
    """(block ids, generations) of a hand-off's payload; None: it names none."""
    try:
        runs = decode_total(_RUNS, payload)
    except MalformedMessage:
        return None
    return expand_runs(runs)
