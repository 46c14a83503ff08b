"""What the two sides of the vLLM adapter share: the staging pool's books and a step's orders.

vLLM's blocks belong to vLLM, lie per layer and in its backend's own order. pdkv's connectors see a staging pool
instead, whose blocks are byte images of vLLM's; only whole blocks are saved and loaded, so the order may be any.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdkv.connectors.base import BlockHold, KVConnectorMetadata, TransferKey


class BlockPairs(NamedTuple):
    """Staging blocks and the vLLM blocks that they are images of, in order."""

    staging: list[int]
    vllm: list[int]


class StepOrders(NamedTuple):
    """One step's orders to the worker side. Plain data."""

    copies: BlockPairs  # out of vLLM's blocks when the step has been computed, before anything of `inner`
    loads: dict[TransferKey, BlockPairs]  # that begin in this step: into vLLM's blocks when they are in
    inner: KVConnectorMetadata  # of the pdkv connector


class StagingBooks:
    """Which staging blocks are free. A block is in use while its step, a load or a hold of a transfer needs it.

    Block 0 is never given out: it stands where a block table has no image.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._step: list[int] = []  # taken for copies of the last step
        self._holds: dict[TransferKey, Sequence[int]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self, num_blocks: int) -> list[int]:
        """Take free blocks; there must be so many."""
        taken = [self._free.pop() for _ in range(num_blocks)]
        for block_id in taken:
            self._users[block_id] = 1
        return taken

    def take_for_step(self, num_blocks: int) -> list[int]:
        """Take blocks until `end_step`; what a hold names by then stays until the hold ends."""
        taken = self.take(num_blocks)
        self._step += taken
        return taken

    def end_step(self) -> None:
        """The workers get the next step after the last one: what that has copied is held or done with."""
        step, self._step = self._step, []
        self.release(step)

    def hold(self, hold: BlockHold) -> None:
        """A transfer reads these blocks."""
        for block_id in hold.block_ids:
            self._users[block_id] += 1
        self._holds[hold.key] = hold.block_ids

    def end_hold(self, key: TransferKey) -> None:
        """A transfer has let go; unknown ones change nothing."""
        self.release(self._holds.pop(key, ()))

    def release(self, block_ids: Iterable[int]) -> None:
        """One user of each block is done with it."""
        for block_id in block_ids:
            self._users[block_id] -= 1
            if not self._users[block_id] and block_id:
                self._free.append(block_id)

    def check_integrity(self) -> None:
        """Raises AssertionError where free blocks are used, or used ones free."""
        assert len(set(self._free)) == len(self._free)
        assert all((self._users[b] == 0) == (b in set(self._free)) for b in range(1, self.num_blocks))
