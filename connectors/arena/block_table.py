"""The block table in shared memory: one writer (the pool's owner), any number of readers in other processes.

Three arrays and a hint: `generations` and `published` per block, `keys` per hash block, and a set-associative index
(`entries`) from key to hash block. A block's keys are valid iff published = generation + 1, so that `reuse` withdraws
them with the one 8-byte store that bumps the generation. An entry is one 8-byte store, too, and only a hint: readers
verify it against `keys`. A writer that dies between any two stores leaves nothing that a reader would believe.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.connectors.block_table import BlockTable
from pdkv.connectors.transfer.planning import Ids, as_ids
from pdkv.host.fence import fence
from pdkv.kernels.block_table import TableWriter, available

KEY_BYTES = 16
WAYS = 16
"""Entries of one set of the index; with four entries per key, a set overflows about once in a million."""

_TAG_AND_SET = struct.Struct("<4xIQ")  # in a key's bytes
_TAG_SHIFT = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)

Words = npt.NDArray[np.uint64]
NO_UNIT = -1


class TableShape(NamedTuple):
    """Sizes of one table."""

    num_blocks: int
    keys_per_block: int

    @property
    def num_units(self) -> int:
        """Hash blocks in the pool; unit u is hash block u % keys_per_block of block u // keys_per_block."""
        return self.num_blocks * self.keys_per_block

    @property
    def num_sets(self) -> int:
        """Sets of the index, a power of two: at most a quarter of the entries is used."""
        return 1 << max(0, (self.num_units * 4 // WAYS - 1).bit_length())

    @property
    def num_bytes(self) -> int:
        """Bytes of the three arrays and the index."""
        return 16 * self.num_blocks + KEY_BYTES * self.num_units + 8 * WAYS * self.num_sets


class TableArrays(NamedTuple):
    """The table's memory as arrays."""

    generations: npt.NDArray[np.int64]  # (num_blocks,)
    published: npt.NDArray[np.int64]  # (num_blocks,): generation + 1 at the time of publication; 0: never
    keys: Words  # (num_units, 2)
    entries: Words  # (num_sets, WAYS): tag << 32 | unit + 1; 0: empty

    @classmethod
    def over(cls, buffer: memoryview, shape: TableShape) -> "TableArrays":
        """Lay the arrays over a zeroed buffer of `shape.num_bytes` bytes, 8-byte aligned."""
        words = np.frombuffer(buffer, dtype=np.uint64, count=shape.num_bytes // 8)
        ends = np.cumsum([shape.num_blocks, shape.num_blocks, 2 * shape.num_units])
        generations, published, keys, entries = np.split(words, ends)
        return cls(generations.view(np.int64), published.view(np.int64), keys.reshape(-1, 2), entries.reshape(-1, WAYS))


def key_words(keys: Sequence[bytes]) -> Words:
    """Keys of 16 bytes as (n, 2) words: the first one has the index's tag, the second one selects the set."""
    return np.frombuffer(b"".join(keys), dtype=np.uint64).reshape(-1, 2)


class SharedBlockTable(BlockTable):
    """The writer's side. Single-threaded: used by the engine's scheduler."""

    def __init__(self, arrays: TableArrays, shape: TableShape) -> None:
        self._shape = shape
        self._num_sets = shape.num_sets
        self._key_sizes = [KEY_BYTES] * shape.keys_per_block
        self._arrays = arrays
        self._slots = np.full(shape.num_units, NO_UNIT, dtype=np.int64)  # the unit's entry in the flat index
        # Scalar accesses through a memoryview cost a third of numpy's; each is one aligned 8-byte load or store.
        self._generations = arrays.generations.data
        self._published = arrays.published.data
        self._keys = arrays.keys.reshape(-1).view(np.uint8).data
        self._entries = arrays.entries.reshape(-1).data
        self._slot_of = memoryview(self._slots.data)
        self._compiled = TableWriter(*arrays, self._slots) if available() else None

    def generation(self, block_id: int) -> int:
        return int(self._generations[block_id])

    def generations_of(self, block_ids: Sequence[int] | Ids) -> Ids:
        return self._arrays.generations[as_ids(block_ids)]

    def reuse(self, block_id: int) -> None:
        self._generations[block_id] += 1
        fence()  # before any byte of the new content
        first = block_id * self._shape.keys_per_block
        for unit in range(first, first + self._shape.keys_per_block):
            slot = self._slot_of[unit]
            if slot != NO_UNIT:
                self._entries[slot] = 0
                self._slot_of[unit] = NO_UNIT

    def reuse_all(self, block_ids: Sequence[int]) -> None:
        if self._compiled is None:
            super().reuse_all(block_ids)
        else:
            self._compiled.reuse(block_ids)

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        """Make the block findable by each of its keys. Publishing it again changes nothing.

        Raises:
            ValueError: there is not one key of 16 bytes per hash block.
        """
        per_block = self._shape.keys_per_block
        if list(map(len, keys)) != self._key_sizes:
            raise ValueError(f"block {block_id} needs {per_block} keys of {KEY_BYTES} bytes")
        valid = self._generations[block_id] + 1
        if self._published[block_id] == valid:
            return
        first = block_id * per_block
        self._keys[first * KEY_BYTES : (first + per_block) * KEY_BYTES] = b"".join(keys)
        fence()  # the content and its keys are in place before they count
        self._published[block_id] = valid
        for unit, key in enumerate(keys, first):
            self._insert(unit, key)

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Publish many blocks. Raises ValueError unless there is one key of 16 bytes per hash block."""
        if self._compiled is not None:
            self._compiled.publish(block_ids, keys)
            return
        per_block = self._shape.keys_per_block
        if len(keys) != per_block * len(block_ids):
            raise ValueError(f"{len(block_ids)} blocks need {per_block} keys of {KEY_BYTES} bytes each")
        super().publish_all(block_ids, keys)

    def close(self) -> None:
        """Release the memory. Idempotent; the table must not be used afterwards."""
        for view in (self._generations, self._published, self._keys, self._entries):
            view.release()
        generations, published, keys, entries = self._arrays
        self._arrays = TableArrays(generations[:0].copy(), published[:0].copy(), keys[:0].copy(), entries[:0].copy())
        self._compiled = None

    def _insert(self, unit: int, key: bytes) -> None:
        tag, first = _place(key, self._num_sets)
        entries = self._entries
        for slot in range(first, first + WAYS):
            if not entries[slot]:
                break
        else:  # a full set: one of its entries is no longer found, which costs only a hit
            slot = first + unit % WAYS
            self._slot_of[(entries[slot] & 0xFFFFFFFF) - 1] = NO_UNIT
        entries[slot] = tag << 32 | unit + 1
        self._slot_of[unit] = slot


def _place(key: bytes, num_sets: int) -> tuple[int, int]:
    """A key's tag and the position of its set in the flat entries."""
    tag, set_word = _TAG_AND_SET.unpack(key)
    return tag, (set_word & (num_sets - 1)) * WAYS


class Found(NamedTuple):
    """Results of a search, one entry per key."""

    units: Ids  # NO_UNIT: not found
    generations: Ids  # of the unit's block, when the key was read


class BlockTableReader:
    """A reader's side; never writes, takes no lock, and trusts only verified entries."""

    def __init__(self, arrays: TableArrays, shape: TableShape) -> None:
        self._shape = shape
        self._num_sets = shape.num_sets
        self._arrays = arrays
        self._entries = arrays.entries.reshape(-1).data

    def may_have(self, key: bytes) -> bool:
        """Whether looking the key up is worthwhile: a cheap test that is false for nearly every key not in the pool."""
        tag, first = _place(key, self._num_sets)
        return any(entry >> 32 == tag for entry in self._entries[first : first + WAYS].tolist())

    def generations(self, block_ids: Ids) -> Ids:
        """The blocks' current generations, read after all earlier copies."""
        fence()
        return self._arrays.generations[block_ids]

    def find(self, keys: Words) -> Found:
        """Look all keys up at once.

        Args:
            keys: (n, 2), as returned by `key_words`.
        """
        arrays, shape = self._arrays, self._shape
        sets = (keys[:, 1] & np.uint64(self._num_sets - 1)).astype(np.int64)
        entries = arrays.entries[sets]
        tags = keys[:, :1] >> _TAG_SHIFT
        rows, ways = np.nonzero((entries >> _TAG_SHIFT == tags) & (entries != 0))
        units = (entries[rows, ways] & _LOW).astype(np.int64) - 1
        inside = (units >= 0) & (units < shape.num_units)
        rows, units = rows[inside], units[inside]
        blocks = units // shape.keys_per_block
        # The order matters: the keys count if the generation is valid and unchanged after they were read.
        before = arrays.generations[blocks]
        valid = arrays.published[blocks] == before + 1
        fence()
        valid &= (arrays.keys[units] == keys[rows]).all(axis=1)
        fence()
        valid &= arrays.generations[blocks] == before
        found = Found(np.full(len(keys), NO_UNIT, dtype=np.int64), np.zeros(len(keys), dtype=np.int64))
        found.units[rows[valid]] = units[valid]
        found.generations[rows[valid]] = before[valid]
        return found

    def find_chain(self, keys: Words) -> Found:
        """The longest prefix of `keys` that is completely in the pool; it ends at the first missing key."""
        found = self.find(keys)
        missing = np.flatnonzero(found.units == NO_UNIT)
        length = int(missing[0]) if missing.size else len(keys)
        return Found(found.units[:length], found.generations[:length])
