"""Blocks, holders, content and the five-way accounting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.connectors.block_table import LocalBlockTable
from pdkv.engine.block_pool import BlockPool, Holder
from pdkv.wire.messages import BlockCounts, BlockRemoved, BlockStored, CacheCleared


def make_pool(num_blocks: int = 4) -> BlockPool:
    return BlockPool(num_blocks, LocalBlockTable(num_blocks))


def key(i: int) -> list[bytes]:
    return [i.to_bytes(16, "little")]


def allocate(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def test_a_block_counts_once_in_the_first_class_that_holds() -> None:
    pool = make_pool()
    a, b, c = allocate(pool, 3)
    pool.commit(b, key(1), None)
    pool.hold([a], Holder.QUARANTINE)
    pool.hold([b], Holder.LEASE)
    assert pool.counts() == BlockCounts(total=4, free=1, cached=0, active=2, leased=0, quarantined=1)
    pool.release([a, b, c], Holder.ACTIVE)
    assert pool.counts() == BlockCounts(total=4, free=2, cached=0, active=0, leased=1, quarantined=1)
    pool.release([b], Holder.LEASE)
    assert pool.counts() == BlockCounts(total=4, free=2, cached=1, active=0, leased=0, quarantined=1)


def test_allocation_is_all_or_nothing() -> None:
    pool = make_pool()
    assert pool.allocate(5) is None
    assert pool.num_available == 4


def test_content_survives_its_holder_until_the_block_is_reused() -> None:
    pool = make_pool(2)
    (block,) = allocate(pool, 1)
    pool.commit(block, key(7), None)
    pool.release([block], Holder.ACTIVE)
    assert pool.lookup(key(7)[-1]) == block
    allocate(pool, 2)
    assert pool.lookup(key(7)[-1]) is None


def test_blocks_without_content_and_then_the_ends_of_chains_are_reused_first() -> None:
    pool = make_pool(4)
    first, second, third, empty = allocate(pool, 4)
    for i, block in enumerate((first, second, third)):
        pool.commit(block, key(i), key(i - 1)[-1] if i else None)
    pool.release([first, second, third, empty], Holder.ACTIVE)
    assert allocate(pool, 4) == [empty, third, second, first]


def test_reuse_bumps_the_generation_before_the_block_is_handed_out() -> None:
    pool = make_pool(1)
    (block,) = allocate(pool, 1)
    before = pool.table.generation(block)
    pool.release([block], Holder.ACTIVE)
    allocate(pool, 1)
    assert pool.table.generation(block) == before + 1


def test_a_second_copy_of_known_content_stays_private() -> None:
    pool = make_pool()
    a, b = allocate(pool, 2)
    pool.commit(a, key(1), None)
    pool.commit(b, key(1), None)
    assert pool.lookup(key(1)[-1]) == a
    assert not pool.has_content(b)


def test_releasing_a_holder_that_is_not_there_is_refused() -> None:
    pool = make_pool()
    (block,) = allocate(pool, 1)
    pool.release([block], Holder.ACTIVE)
    with pytest.raises(AssertionError, match="no ACTIVE holder"):
        pool.release([block], Holder.ACTIVE)


def test_events_tell_what_enters_and_leaves_the_cache() -> None:
    pool = make_pool(1)
    (block,) = allocate(pool, 1)
    pool.commit(block, key(1), None)
    pool.release([block], Holder.ACTIVE)
    allocate(pool, 1)
    assert pool.events == [BlockStored(key(1), None), BlockRemoved(key(1))]


def test_a_snapshot_begins_with_cleared_and_has_parents_first() -> None:
    pool = make_pool(4)
    blocks = allocate(pool, 3)
    for i in (2, 0, 1):  # children may be committed by another request before a lost parent comes again
        pool.commit(blocks[i], key(i), key(i - 1)[-1] if i else None)
    cleared, *stored = pool.snapshot_events()
    assert cleared == CacheCleared()
    assert [event.keys for event in stored if isinstance(event, BlockStored)] == [key(0), key(1), key(2)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.sampled_from(list(Holder))), max_size=60))
@settings(max_examples=200)
def test_the_books_agree_after_any_sequence(actions: list[tuple[int, int, Holder]]) -> None:
    pool = make_pool(8)
    held: list[tuple[int, Holder]] = []
    for action, number, holder in actions:
        if action <= 1:
            block_ids = pool.allocate(number % 3 + 1)
            held += [(block_id, Holder.ACTIVE) for block_id in block_ids or ()]
        elif action == 2 and held:
            pool.hold([held[number % len(held)][0]], holder)
            held.append((held[number % len(held)][0], holder))
        elif action == 3 and held:
            pool.commit(held[number % len(held)][0], key(number), None)
        elif held:
            block_id, kind = held.pop(number % len(held))
            pool.release([block_id], kind)
        pool.check_integrity()
        counts = pool.counts()
        assert counts.free + counts.cached + counts.active + counts.leased + counts.quarantined == counts.total
    assert pool.num_available == 8 - len({block_id for block_id, _ in held})
