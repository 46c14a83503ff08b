"""The digest of a hand-off does not depend on how KV lies or is cut, and shows every change of what it is of."""

import random

import numpy as np
import numpy.typing as npt
import pytest

from pdkv.base.block_keys import HASH_BLOCK_SIZE
from pdkv.connectors.base import TransferKey
from pdkv.connectors.transfer.digest import PoolDigests, Tokens, bind, cut_tokens
from pdkv.connectors.transfer.digest_table import rows_of
from pdkv.connectors.transfer.planning import rank_heads
from pdkv.connectors.transfer.pool_copy import unit_pieces
from pdkv.connectors.transfer.units import UnitPart
from pdkv.wire.kv import KVLayout

LAYERS, HEADS, HEAD_SIZE = 3, 4, 6
NUM_TOKENS = 117

KV = npt.NDArray[np.int16]


def make_kv(seed: int = 0) -> KV:
    """(tokens, layers, 2, heads, head_size)"""
    shape = (NUM_TOKENS, LAYERS, 2, HEADS, HEAD_SIZE)
    return np.random.default_rng(seed).integers(-(1 << 15), 1 << 15, shape, dtype=np.int16)


class Placed:
    """KV in the pools of an engine's ranks, in blocks of some size wherever these lie."""

    def __init__(self, kv: KV, block_size: int, tp: int, chance: random.Random) -> None:
        count = -(-NUM_TOKENS // block_size)
        self.block_size, self.blocks = block_size, chance.sample(range(count + 3), count)
        heads = [rank_heads(rank, tp, HEADS) for rank in range(tp)]
        self.layout = KVLayout(LAYERS, len(heads[0]), HEAD_SIZE, block_size, "int16", 2, HEADS)
        garbage = np.random.default_rng(chance.randrange(1 << 30))
        self.pools = []
        for own in heads:
            shape = (count + 3, LAYERS, 2, len(own), block_size, HEAD_SIZE)
            pool = garbage.integers(-(1 << 15), 1 << 15, shape, dtype=np.int16)
            for token in range(NUM_TOKENS):
                block, offset = self.blocks[token // block_size], token % block_size
                pool[block, :, :, :, offset] = kv[token][:, :, own.start : own.stop]
            self.pools.append(pool)
        self.heads = heads
        self.ranks = [PoolDigests(pool, self.layout, rank=rank, tp=tp) for rank, pool in enumerate(self.pools)]

    def tokens(self, start: int, stop: int) -> Tokens:
        first = start // self.block_size
        return cut_tokens(self.blocks[first:], self.block_size, start, stop, first=start)


def whole_digest(kv: KV, start: int = 0, stop: int = NUM_TOKENS) -> npt.NDArray[np.uint64]:
    placed = Placed(kv, 16, 1, random.Random(0))
    rank = placed.ranks[0]
    return rank.digests(placed.tokens(start, stop), rank.whole)


@pytest.mark.parametrize("seed", range(12))
def test_any_cut_of_the_same_kv_gives_the_same_digest(seed: int) -> None:
    """Block size, ranks, places, and pieces of tokens, layers and heads, at random."""
    chance, kv = random.Random(seed), make_kv(seed)
    start = 16 * chance.randrange(3)
    placed = Placed(kv, chance.choice([16, 32, 48, 80]), chance.choice([1, 2, 4, 8]), chance)
    total = np.zeros((-(-NUM_TOKENS // 16), HEADS), dtype=np.uint64)
    cuts = sorted(chance.sample(range(start + 16, NUM_TOKENS, 16), 2))
    seen = set()
    for rank, own in zip(placed.ranks, placed.heads, strict=True):
        if own in seen:
            continue  # the same heads once more
        seen.add(own)
        for first, stop in zip([start, *cuts], [*cuts, NUM_TOKENS], strict=True):
            for layers in (range(1), range(1, LAYERS)):
                for head in range(len(own)):
                    part = UnitPart(head, head + 1, layers.start, layers.stop)
                    here = slice(first // 16, -(-stop // 16))
                    total[here, own.start + head] += rank.digests(placed.tokens(first, stop), part)[:, 0]
    assert np.array_equal(total[start // 16 :], whole_digest(kv, start))


def test_blocks_smaller_than_a_hash_block_have_digests_of_their_own() -> None:
    placed, other = (Placed(make_kv(), 8, 1, random.Random(seed)) for seed in (1, 2))
    results = [p.ranks[0].digests(p.tokens(3, 101), p.ranks[0].whole) for p in (placed, other)]
    assert np.array_equal(*results)
    assert len(results[0]) == 13


def changed_units(change: KV, kv: KV) -> list[int]:
    return np.flatnonzero((whole_digest(change) != whole_digest(kv)).any(axis=1)).tolist()


@pytest.mark.parametrize("seed", range(40))
def test_one_flipped_bit_shows_where_it_is(seed: int) -> None:
    chance, kv = random.Random(seed), make_kv()
    damaged = kv.copy()
    token = chance.randrange(NUM_TOKENS)
    place = (token, chance.randrange(LAYERS), chance.randrange(2), chance.randrange(HEADS), chance.randrange(HEAD_SIZE))
    damaged.view(np.uint16)[place] ^= 1 << chance.randrange(16)
    differs = whole_digest(damaged) != whole_digest(kv)
    assert np.argwhere(differs).tolist() == [[token // 16, place[3]]]


def test_exchanged_tokens_layers_sides_and_heads_show() -> None:
    kv = make_kv()
    for axis in range(4):
        damaged = kv.copy()
        view = damaged.swapaxes(0, axis)
        view[[0, 1]] = view[[1, 0]]
        assert changed_units(damaged, kv) == ([0] if axis == 0 else list(range(8))), axis
    damaged = kv.copy()
    damaged[[0, 20]] = damaged[[20, 0]]
    assert changed_units(damaged, kv) == [0, 1]
    damaged = kv.copy()
    damaged[16:32], damaged[32:48] = kv[32:48], kv[16:32]
    assert changed_units(damaged, kv) == [1, 2]


def test_a_tail_is_digested_as_far_as_it_goes() -> None:
    kv = make_kv()
    tails = [whole_digest(kv, 112, stop) for stop in range(113, NUM_TOKENS + 1)]
    assert len({tail.tobytes() for tail in tails}) == 5
    behind = kv.copy()
    behind[115:] += 1
    assert np.array_equal(whole_digest(behind, 112, 115), tails[2])


def test_a_table_that_says_more_than_a_hash_block_has_is_believed_no_further() -> None:
    """As many tokens are digested behind it, in the reader's own pool, which may end there."""
    lies = np.array([[32 * (7 + 1) + 31, 5]], dtype=np.int64)
    assert rows_of(lies, np.array([7])).counts.tolist() == [HASH_BLOCK_SIZE]


def test_a_block_of_another_transfer_or_place_does_not_match() -> None:
    digests = whole_digest(make_kv(), 0, 48)
    sent = bind(digests, TransferKey("one", 0), 0, 16)
    assert len(sent) == 3 * 8
    for key, start in ((("two", 0), 0), (("one", 1), 0), (("one", 0), 16)):
        other = bind(digests, key, start, 16)
        assert all(sent[i : i + 8] != other[i : i + 8] for i in range(0, 24, 8)), (key, start)
    assert bind(digests[1:], TransferKey("one", 0), 16, 16) == sent[8:]
    same = np.repeat(digests[:1], 2, axis=0)
    assert len({bind(same, TransferKey("one", 0), 0, 16)[i : i + 8] for i in (0, 8)}) == 2


@pytest.mark.parametrize("tp", [1, 2])
def test_a_copy_returns_the_digests_of_what_it_copied(tp: int) -> None:
    """Between blocks and ranks of other sizes, with a tail that is digested in part and copied whole."""
    chance, kv = random.Random(tp), make_kv()
    source, target = Placed(kv, 48, 2, chance), Placed(make_kv(1), 32, tp, chance)
    for head in range(HEADS):
        ranks = [next(i for i, own in enumerate(p.heads) if head in own) for p in (source, target)]
        first = [head - p.heads[rank].start for p, rank in zip((source, target), ranks, strict=True)]
        theirs, ours = (UnitPart(h, h + 1, 0, LAYERS) for h in first)
        tokens = target.tokens(32, NUM_TOKENS)
        there = source.tokens(32, NUM_TOKENS)
        own, peer = target.ranks[ranks[1]], source.ranks[ranks[0]]
        assert peer.flat is not None
        pieces = unit_pieces(own.layout, peer.layout, there.units, theirs.head_start, tokens.units, ours)
        landed = own.copy(tokens, ours, peer.flat, pieces, lambda: None)
        assert np.array_equal(landed, own.digests(tokens, ours))
        assert np.array_equal(landed[:, 0], whole_digest(kv, 32)[:, head])
    assert np.array_equal(whole_digest(kv, 32), sum_of(target)[2:])


def sum_of(placed: Placed) -> npt.NDArray[np.uint64]:
    total = np.zeros((-(-NUM_TOKENS // 16), HEADS), dtype=np.uint64)
    for rank, own in zip(placed.ranks, placed.heads, strict=True):
        total[:, own.start : own.stop] = rank.digests(placed.tokens(0, NUM_TOKENS), rank.whole)
    return total
