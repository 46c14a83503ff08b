"""The block table in shared memory: what readers find is what the writer published and has not reused."""

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdkv.connectors.arena import block_table
from pdkv.connectors.arena.block_table import (
    NO_UNIT,
    WAYS,
    BlockTableReader,
    SharedBlockTable,
    TableArrays,
    TableShape,
    key_words,
)


def _key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


class _Table:
    """A writer and a reader over one buffer."""

    def __init__(self, num_blocks: int, keys_per_block: int = 1, *, compiled: bool = True) -> None:
        self.shape = TableShape(num_blocks, keys_per_block)
        self.arrays = TableArrays.over(memoryview(bytearray(self.shape.num_bytes)), self.shape)
        with pytest.MonkeyPatch.context() as patch:
            if not compiled:
                patch.setattr(block_table, "available", lambda: False)
            self.writer = SharedBlockTable(self.arrays, self.shape)
        self.reader = BlockTableReader(self.arrays, self.shape)

    def units(self, keys: Sequence[bytes]) -> list[int]:
        return self.reader.find(key_words(keys)).units.tolist()


def test_published_blocks_are_found_with_their_generation() -> None:
    table = _Table(8)
    table.writer.reuse(3)
    table.writer.reuse(3)
    table.writer.publish(3, [_key(1)])
    found = table.reader.find(key_words([_key(0), _key(1)]))
    assert found.units.tolist() == [NO_UNIT, 3]
    assert found.generations[1] == table.writer.generation(3) == 2


def test_reuse_withdraws_before_anything_is_written() -> None:
    table = _Table(8)
    table.writer.publish(3, [_key(1)])
    table.writer.reuse(3)
    assert table.units([_key(1)]) == [NO_UNIT]
    assert table.reader.generations(np.array([3])).tolist() == [1]


def test_each_hash_block_of_a_block_is_found() -> None:
    table = _Table(8, keys_per_block=3)
    table.writer.publish(2, [_key(0), _key(1), _key(2)])
    assert table.units([_key(2), _key(0), _key(1)]) == [8, 6, 7]


def test_a_copy_is_still_found_when_the_other_is_reused() -> None:
    table = _Table(8)
    table.writer.publish(1, [_key(1)])
    table.writer.publish(2, [_key(1)])
    table.writer.reuse(1)
    assert table.units([_key(1)]) == [2]


def test_a_chain_ends_at_its_first_gap() -> None:
    table = _Table(8)
    for block, number in ((5, 0), (1, 1), (2, 3)):
        table.writer.publish(block, [_key(number)])
    chain = table.reader.find_chain(key_words([_key(n) for n in range(4)]))
    assert chain.units.tolist() == [5, 1]


def test_a_cheap_look_rules_out_what_is_not_there() -> None:
    table = _Table(64)
    table.writer.publish(5, [_key(5)])
    assert table.reader.may_have(_key(5))
    assert not any(table.reader.may_have(_key(n)) for n in range(100, 200))


@pytest.mark.parametrize("keys", [[], [b"short"], [_key(1), _key(2)]])
def test_wrong_keys_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="needs 1 keys of 16 bytes"):
        _Table(4).writer.publish(0, keys)


def test_an_overflowing_set_loses_hits_and_nothing_else() -> None:
    """Keys that all fall into one set of the index."""
    table = _Table(64)
    keys = [number.to_bytes(4, "little") * 2 + bytes(8) for number in range(64)]
    for block, key in enumerate(keys):
        table.writer.publish(block, [key])
    units = table.units(keys)
    assert [unit for block, unit in enumerate(units) if unit not in (block, NO_UNIT)] == []
    assert sum(unit != NO_UNIT for unit in units) == WAYS
    for block in range(64):
        table.writer.reuse(block)
    assert table.units(keys) == [NO_UNIT] * 64
    assert not table.arrays.entries.any()


def test_an_entry_that_names_no_unit_is_not_followed() -> None:
    table = _Table(4)
    table.writer.publish(1, [_key(1)])
    table.arrays.entries[table.arrays.entries != 0] += np.uint64(1000)
    assert table.units([_key(1)]) == [NO_UNIT]


@pytest.mark.parametrize("stores", ["generation", "keys", "published"])
def test_a_writer_that_died_between_two_stores_is_not_believed(stores: str) -> None:
    """Block 1 had key 1; the writer dies while it reuses it for key 2."""
    table = _Table(4)
    table.writer.publish(1, [_key(1)])
    table.arrays.generations[1] += 1
    if stores in ("keys", "published"):
        table.arrays.keys[1] = key_words([_key(2)])[0]
    if stores == "published":
        table.arrays.published[1] = table.arrays.generations[1] + 1
    assert table.units([_key(1), _key(2)]) == [NO_UNIT, NO_UNIT]


@pytest.mark.parametrize("num_blocks", [8, 64, 300])
def test_many_blocks_at_once_are_as_one_by_one(num_blocks: int) -> None:
    """Small tables overflow their sets: there some are not found in either, and none is found in a wrong place."""
    one_by_one, at_once = _Table(num_blocks, keys_per_block=3), _Table(num_blocks, keys_per_block=3)
    blocks = [(7 * i + 3) % num_blocks for i in range(num_blocks)]
    for turn in range(3):
        some = blocks[turn :: 1 + turn % 2]
        keys = [_key(1000 * turn + unit) for unit in range(3 * len(some))]
        for table in (one_by_one, at_once):
            before = table.writer.generations_of(some)
            if table is at_once:
                table.writer.reuse_all(some)
                table.writer.publish_all(some, keys)
                table.writer.publish_all(some, keys)  # changes nothing
            else:
                for i, block in enumerate(some):
                    table.writer.reuse(block)
                    table.writer.publish(block, keys[3 * i : 3 * i + 3])
            assert np.array_equal(table.writer.generations_of(some), before + 1)
            expected = [3 * block + i for block in some for i in range(3)]
            found = table.units(keys)
            assert all(unit in (own, NO_UNIT) for unit, own in zip(found, expected, strict=True))
            assert sum(unit == NO_UNIT for unit in found) <= len(found) // 20
    assert np.array_equal(one_by_one.arrays.generations, at_once.arrays.generations)
    assert np.array_equal(one_by_one.arrays.published, at_once.arrays.published)
    assert np.array_equal(one_by_one.arrays.keys, at_once.arrays.keys)
    at_once.writer.reuse_all(list(range(num_blocks)))
    assert not at_once.arrays.entries.any()


def test_a_full_set_takes_no_more_at_once_than_one_by_one() -> None:
    table = _Table(64)
    keys = [number.to_bytes(4, "little") * 2 + bytes(8) for number in range(64)]
    table.writer.publish_all(list(range(64)), keys)
    units = table.units(keys)
    assert [unit for block, unit in enumerate(units) if unit not in (block, NO_UNIT)] == []
    assert sum(unit != NO_UNIT for unit in units) == WAYS
    table.writer.reuse_all(list(range(64)))
    assert not table.arrays.entries.any()


@pytest.mark.parametrize("num_blocks", [16, 64, 3000])
def test_the_compiled_table_is_the_one_that_python_makes(num_blocks: int) -> None:
    compiled, python = (_Table(num_blocks, keys_per_block=2, compiled=which) for which in (True, False))
    assert compiled.writer._compiled is not None
    assert python.writer._compiled is None
    rng = random.Random(num_blocks)
    for _ in range(4):
        blocks = rng.sample(range(num_blocks), num_blocks // 2)
        keys = [rng.randbytes(16) for _ in range(num_blocks)]
        for table in (compiled, python):
            table.writer.reuse_all(blocks)
            table.writer.publish_all(blocks, keys)
        assert np.array_equal(compiled.arrays.entries, python.arrays.entries)
        assert np.array_equal(compiled.arrays.keys, python.arrays.keys)
        assert np.array_equal(compiled.arrays.published, python.arrays.published)
        assert np.array_equal(compiled.writer._slots, python.writer._slots)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("keys", [[], [b"short", b"shorter"], [_key(1)], [bytes(15), bytes(17)]])
def test_wrong_keys_of_many_blocks_are_refused(keys: list[bytes], compiled: bool) -> None:
    with pytest.raises(ValueError, match=r"needs? 1 keys of 16 bytes"):
        _Table(4, compiled=compiled).writer.publish_all([0, 1], keys)


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_that_the_table_has_not_is_refused(block: int) -> None:
    writer = _Table(4).writer
    with pytest.raises(IndexError):
        writer.reuse_all([0, block])
    with pytest.raises(IndexError):
        writer.publish_all([0, block], [_key(1), _key(2)])


_OPERATIONS = st.lists(st.tuples(st.integers(0, 7), st.none() | st.integers(0, 9)), max_size=60)


@given(_OPERATIONS)
def test_lookups_agree_with_a_dictionary(operations: list[tuple[int, int | None]]) -> None:
    """Random reuse (None) and publication of chains of two keys; the model is a dict block -> chain."""
    table = _Table(8, keys_per_block=2)
    model: dict[int, int] = {}
    generations = [0] * 8
    for block, chain in operations:
        if chain is None:
            table.writer.reuse(block)
            generations[block] += 1
            model.pop(block, None)
        elif block not in model:
            table.writer.publish(block, [_key(2 * chain), _key(2 * chain + 1)])
            model[block] = chain
    for number in range(20):
        holders = [block for block, chain in model.items() if chain == number // 2]
        found = table.reader.find(key_words([_key(number)]))
        unit = int(found.units[0])
        if not holders:
            assert unit == NO_UNIT
        else:
            assert unit // 2 in holders
            assert unit % 2 == number % 2
            assert found.generations[0] == generations[unit // 2]
    assert table.reader.generations(np.arange(8)).tolist() == generations
    assert np.count_nonzero(table.arrays.entries) == 2 * len(model)
