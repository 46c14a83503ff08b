"""The table beside a KV pool that makes late reads safe: per block a generation and the key of its content.

The owner bumps a block's generation before it reuses the block. A reader copies the data and *then* compares the
generation with the one it was told: what was reused meanwhile is refused, never applied.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BlockTable(ABC):
    """Written by the engine that owns the pool, read by its peers."""

    @abstractmethod
    def generation(self, block_id: int) -> int:
        """The block's current generation."""

    def generations_of(self, block_ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """The generations of many blocks."""
        return np.fromiter(map(self.generation, block_ids), np.int64, len(block_ids))

    @abstractmethod
    def reuse(self, block_id: int) -> None:
        """The block's content ends now: bump its generation and withdraw its key."""

    @abstractmethod
    def publish(self, block_id: int, keys: list[bytes]) -> None:
        """The block is full and immutable; `keys` are its hash blocks' keys, in order."""


class LocalBlockTable(BlockTable):
    """A table that only this process reads."""

    def __init__(self, num_blocks: int) -> None:
        self.generations = [0] * num_blocks

    def generation(self, block_id: int) -> int:
        return self.generations[block_id]

    def reuse(self, block_id: int) -> None:
        self.generations[block_id] += 1

    def publish(self, block_id: int, keys: list[bytes]) -> None:
        """Nobody else reads: nothing to do."""
