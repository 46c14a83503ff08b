"""Blocks, holders, content and the five-way accounting."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdkv.connectors.block_table import BlockTable, LocalBlockTable
from pdkv.engine.kv.block_pool import MAX_KEYS_PER_EVENT, BlockPool, Holder
from pdkv.engine.kv.free_queue import FreeQueue
from pdkv.kernels.block_pool import available
from pdkv.wire.messages import BlockRemoved, BlockStored, CacheCleared
from pdkv.wire.reports import BlockCounts
from tests.conftest import EXAMPLES


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
    pool.commit([b], key(1), None)
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
    pool.commit([block], key(7), None)
    pool.release([block], Holder.ACTIVE)
    assert pool.lookup(key(7)[-1]) == block
    allocate(pool, 2)
    assert pool.lookup(key(7)[-1]) is None


def test_blocks_without_content_and_then_the_ends_of_chains_are_reused_first() -> None:
    pool = make_pool(4)
    first, second, third, empty = allocate(pool, 4)
    for i, block in enumerate((first, second, third)):
        pool.commit([block], key(i), key(i - 1)[-1] if i else None)
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
    pool.commit([a], key(1), None)
    pool.commit([b], key(1), None)
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
    pool.commit([block], key(1), None)
    pool.release([block], Holder.ACTIVE)
    allocate(pool, 1)
    assert pool.events == [BlockStored(key(1), None), BlockRemoved(key(1))]


def test_a_snapshot_begins_with_cleared_and_has_parents_first() -> None:
    pool = make_pool(4)
    blocks = allocate(pool, 3)
    for i in (2, 0, 1):  # children may be committed by another request before a lost parent comes again
        pool.commit([blocks[i]], key(i), key(i - 1)[-1] if i else None)
    cleared, *stored = pool.snapshot_events()
    assert cleared == CacheCleared()
    assert [event.keys for event in stored if isinstance(event, BlockStored)] == [key(0), key(1), key(2)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.sampled_from(list(Holder))), max_size=60))
@settings(max_examples=50 * EXAMPLES)
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
            pool.commit([held[number % len(held)][0]], key(number), None)
        elif held:
            block_id, kind = held.pop(number % len(held))
            pool.release([block_id], kind)
        pool.check_integrity()
        counts = pool.counts()
        assert counts.free + counts.cached + counts.active + counts.leased + counts.quarantined == counts.total
    assert pool.num_available == 8 - len({block_id for block_id, _ in held})


class Published(LocalBlockTable):
    """Keys that peers would find now, by block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.keys: dict[int, list[bytes]] = {}

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        self.keys[block_id] = keys

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        BlockTable.publish_all(self, block_ids, keys)

    def reuse(self, block_id: int) -> None:
        super().reuse(block_id)
        self.keys.pop(block_id, None)

    def reuse_all(self, block_ids: Sequence[int]) -> None:
        BlockTable.reuse_all(self, block_ids)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("ends", ["withdrawn", "evicted"])
def test_nothing_is_published_of_a_block_whose_content_has_gone(count: int, ends: str) -> None:
    pool = BlockPool(count, table := Published(count))
    block_ids = allocate(pool, count)
    pool.commit(block_ids, [key(i)[0] for i in range(count)], None)
    if ends == "withdrawn":
        pool.withdraw(block_ids[:1])
    pool.release(block_ids, Holder.ACTIVE)
    if ends == "evicted":
        allocate(pool, count)
    assert block_ids[0] not in table.keys
    pool.check_integrity()


@pytest.mark.parametrize("count", [4, 40])
def test_a_chain_is_entered_but_for_what_is_known(count: int) -> None:
    """Blocks of two keys; the second block's content is another block's already."""
    pool = BlockPool(2 * count, table := Published(2 * count), keys_per_block=2)
    keys = [key(i)[0] for i in range(2 * count)]
    (other,) = allocate(pool, 1)
    pool.commit([other], keys[2:4], keys[1])
    block_ids = allocate(pool, count)
    pool.events.clear()
    pool.commit(block_ids, keys, None)
    told = [event for event in pool.events if isinstance(event, BlockStored)]
    assert [k for event in told for k in event.keys] == keys[:2] + keys[4:]
    assert all(
        event.parent == (keys[keys.index(event.keys[0]) - 1] if event.keys != keys[:2] else None) for event in told
    )
    assert pool.lookup_chain([*keys[1::2], b"not here", keys[1]]) == [block_ids[0], other, *block_ids[2:]]
    assert pool.lookup_chain([b"not here", keys[1]]) == []
    assert not pool.has_content(block_ids[1])
    assert table.keys == {b: keys[2 * i : 2 * i + 2] for i, b in enumerate([block_ids[0], other, *block_ids[2:]])}
    pool.check_integrity()
    snapshot = [event for event in pool.snapshot_events() if isinstance(event, BlockStored)]
    assert [event.parent for event in snapshot] == [None, *keys[1:-1:2]]


def test_a_long_chain_is_told_in_events_of_bounded_size() -> None:
    pool = make_pool(MAX_KEYS_PER_EVENT + 10)
    block_ids = allocate(pool, pool.num_blocks)
    keys = [key(i)[0] for i in range(pool.num_blocks)]
    pool.commit(block_ids, keys, None)
    first, second = pool.events
    assert (first, second) == (
        BlockStored(keys[:MAX_KEYS_PER_EVENT], None),
        BlockStored(keys[MAX_KEYS_PER_EVENT:], keys[MAX_KEYS_PER_EVENT - 1]),
    )


@pytest.mark.parametrize("count", [20, 40])
def test_what_is_not_announced_is_found_and_told_to_nobody(count: int) -> None:
    """A group's blocks behind the first: one key each, those given up (-1) are not entered."""
    pool = BlockPool(80, table := Published(80), keys_per_block=2)
    block_ids = allocate(pool, count)
    keys = [key(i)[0] for i in range(count)]
    pool.commit([-1, -1, *block_ids[2:]], keys, None, announced=False)
    (one,) = allocate(pool, 1)
    pool.commit([one], [b"one"], None, announced=False)
    pool.commit([-1], [b"none"], None, announced=False)
    assert pool.lookup(b"none") is None
    assert [pool.lookup(k) for k in keys] == [None, None, *block_ids[2:]]
    assert pool.snapshot_events() == [CacheCleared()]
    pool.check_integrity()
    pool.release([*block_ids, one], Holder.ACTIVE)
    assert pool.counts().cached == count - 1
    allocate(pool, 80)
    assert pool.lookup(b"one") is None
    assert (pool.events, table.keys) == ([], {})
    pool.check_integrity()


@pytest.mark.parametrize("count", [3, 100])
def test_a_block_is_held_as_often_as_it_is_named(count: int) -> None:
    pool = make_pool(count + 1)
    block_ids = allocate(pool, count)
    twice = [*block_ids, *block_ids[:2], block_ids[0]]
    pool.hold(twice, Holder.LEASE)
    pool.release(block_ids, Holder.ACTIVE)
    pool.release(block_ids, Holder.LEASE)
    pool.check_integrity()
    assert [i for i in block_ids if pool.is_held(i)] == block_ids[:2]
    pool.release([*block_ids[:2], block_ids[0]], Holder.LEASE)
    pool.check_integrity()
    assert pool.num_available == count + 1


@pytest.mark.parametrize("count", [3, 100])
def test_withdrawn_blocks_keep_their_holders_and_the_others_content(count: int) -> None:
    """Half are held, half are cached, the last has no content; some are named twice."""
    pool = BlockPool(count + 1, table := Published(count + 1))
    block_ids = allocate(pool, count)
    generations = table.generations_of(block_ids)
    pool.commit(block_ids[:-1], [key(i)[0] for i in range(count - 1)], None)
    pool.release(block_ids[: count // 2], Holder.ACTIVE)
    pool.withdraw([*block_ids[1:], *block_ids[1:]])
    pool.check_integrity()
    assert table.keys == {block_ids[0]: [key(0)[0]]}
    assert (table.generations_of(block_ids) - generations).tolist() == [0, *[1] * (count - 2), 0]
    assert pool.counts() == BlockCounts(count + 1, count // 2, 1, count - count // 2, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20), st.sampled_from(Holder)), max_size=40))
@settings(max_examples=50 * EXAMPLES, deadline=None)
def test_compiled_and_one_by_one_the_books_are_the_same(actions: list[tuple[int, int, Holder]]) -> None:
    """Whatever many blocks go through, blocks that are named twice included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdkv.engine.kv.block_pool._FEW", 0)
        pools = [make_pool(48)]
        patch.setattr("pdkv.engine.kv.block_pool.available", lambda: False)
        pools.append(make_pool(48))
        assert (pools[1]._compiled is None, pools[0]._compiled is None) == (True, not available())
        held: list[tuple[Holder, list[int]]] = []
        for number, (action, count, holder) in enumerate(actions):
            if action == 0:
                taken = [pool.allocate(count) for pool in pools]
                assert taken[0] == taken[1]
                held += [(Holder.ACTIVE, taken[0])] if taken[0] is not None else []
            elif action == 1:
                blocks = list(range(count, count + 9))  # free ones, too
                _both(pools, "hold", blocks, holder)
                held.append((holder, blocks))
            elif action == 2 and held:
                kind, blocks = held.pop(count % len(held))
                _both(pools, "release", blocks, kind)
            elif action == 3 and held:
                blocks = held[count % len(held)][1]
                keys = [k for i in range(len(blocks)) for k in key(1000 * number + i)]
                _both(pools, "commit", blocks, keys, None)
            elif action == 4 and held:
                twice = [block for block in held[count % len(held)][1] for _ in range(2)]
                _both(pools, "hold", twice, holder)
                _both(pools, "release", twice, holder)
            assert pools[0].counts() == pools[1].counts()
        for pool in pools:
            pool.check_integrity()


def _both(pools: list[BlockPool], name: str, *arguments: object) -> None:
    for pool in pools:
        getattr(pool, name)(*arguments)


@pytest.mark.parametrize("compiled", [True, False])
def test_releasing_many_of_which_one_has_no_such_holder_is_refused(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("pdkv.engine.kv.block_pool.available", lambda: False)
    pool = make_pool(64)
    blocks = allocate(pool, 40)
    pool.release([blocks[7]], Holder.ACTIVE)
    with pytest.raises(AssertionError, match=f"block {blocks[7]} has no ACTIVE holder"):
        pool.release(blocks, Holder.ACTIVE)


class Plain:
    """The order of reuse as an ordered dict has it."""

    def __init__(self, num_blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(num_blocks))

    def push(self, block_ids: list[int], *, cached: bool) -> None:
        for block_id in block_ids:
            self.free[block_id] = None
            self.free.move_to_end(block_id, last=cached)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5), st.integers(0, 11)), max_size=80))
@settings(max_examples=50 * EXAMPLES)
def test_free_blocks_come_in_the_order_of_an_ordered_dict(actions: list[tuple[int, int, int]]) -> None:
    """One at a time and many, with blocks that leave from the middle, around the ends of the arrays."""
    queue, plain = FreeQueue(12), Plain(12)
    taken: list[int] = []
    for action, count, which in actions:
        count = min(count, len(plain.free) if action <= 1 else len(taken))
        if action == 0 and plain.free:
            taken.append(queue.take_one())
            assert plain.free.popitem(last=False)[0] == taken[-1]
        elif action == 1 and count:
            got = queue.take(count).tolist()
            assert got == [plain.free.popitem(last=False)[0] for _ in range(count)]
            taken += got
        elif action in (2, 3) and count:
            back, taken = taken[:count], taken[count:]
            queue.push(np.array(back), cached=action == 2)
            plain.push(back, cached=action == 2)
        elif action == 4 and which in plain.free:
            queue.remove(np.array([which]))
            del plain.free[which]
            taken.append(which)
        elif action in (5, 6) and count:
            block_id = taken.pop()
            queue.push_one(block_id, cached=action == 5)
            plain.push([block_id], cached=action == 5)
        assert len(queue) == len(plain.free)
        assert all((block_id in queue) == (block_id in plain.free) for block_id in range(12))
