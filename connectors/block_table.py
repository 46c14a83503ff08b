"""The table next to a KV pool that makes late reads safe: for each block a generation and the key of its content.

The owner increments a block's generation before it reuses the block. A reader copies the data and *then* compares the
generation with the one it was told: data of a reused block is refused, never applied.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdkv.connectors.transfer.planning import Ids, as_ids


class BlockTable(ABC):
    """A table written by the engine that owns the pool and read by its peers."""

    @abstractmethod
    def generation(self, block_id: int) -> int:
        """The block's current generation."""

    def generations_of(self, block_ids: Sequence[int] | Ids) -> Ids:
        """The generations of many blocks."""
        return np.fromiter(map(self.generation, block_ids), np.int64, len(block_ids))

    @abstractmethod
    def reuse(self, block_id: int) -> None:
        """End the block's content: increment its generation and withdraw its key."""

    @abstractmethod
    def publish(self, block_id: int, keys: list[bytes]) -> None:
        """Announce a full, immutable block; `keys` are its hash blocks' keys, in order."""

    def reuse_all(self, block_ids: Sequence[int]) -> None:
        """Call `reuse` for each of them before returning."""
        for block_id in block_ids:
            self.reuse(block_id)

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """Call `publish` for each of them; `keys` are those of all blocks, in order, the same number for each."""
        per_block = len(keys) // max(len(block_ids), 1)
        for i, block_id in enumerate(block_ids):
            self.publish(block_id, list(keys[i * per_block : (i + 1) * per_block]))


class LocalBlockTable(BlockTable):
    """Generations in an array, one int64 per block, without keys, since no peer looks for them."""

    def __init__(self, num_blocks: int, values: npt.NDArray[np.int64] | None = None) -> None:
        """`values`: zeros, one per block, if peers see them."""
        self.values = np.zeros(num_blocks, dtype=np.int64) if values is None else values
        self._view: memoryview[int] = memoryview(self.values.data)  # for single values ten times as fast as numpy

    def close(self) -> None:
        """Release the memory that peers see. Idempotent."""
        self.values = self.values.copy()
        self._view = memoryview(self.values.data)

    def generation(self, block_id: int) -> int:
        return self._view[block_id]

    def reuse(self, block_id: int) -> None:
        self._view[block_id] += 1

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        """No effect, since no peer reads the keys."""

    def generations_of(self, block_ids: Sequence[int] | Ids) -> Ids:
        return self.values[as_ids(block_ids)]

    def reuse_all(self, block_ids: Sequence[int]) -> None:
        """Increment each block's generation; the blocks are distinct."""
        self.values[as_ids(block_ids)] += 1

    def publish_all(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        """No effect."""
