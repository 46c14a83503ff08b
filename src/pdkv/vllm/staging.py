"""Shared by the two sides of the vLLM adapter: the staging pool's bookkeeping and a step's orders.

vLLM's blocks belong to vLLM, per layer and in its backend's own order. pdkv's connectors see a staging pool instead,
with byte images of vLLM's blocks; only whole blocks are saved and loaded, so any order will do.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdkv.connectors.base import BlockHold, KVConnectorMetadata, TransferKey
from pdkv.wire.kv import EngineCard


class BlockPairs(NamedTuple):
    """Staging blocks and the vLLM blocks that they are images of, in order."""

    staging: list[int]
    vllm: list[int]


class PeerChange(NamedTuple):
    """Peers that came and went."""

    added: list[EngineCard]
    removed: list[EngineCard]


class StepOrders(NamedTuple):
    """One step's orders to the worker side. Plain data."""

    copies: BlockPairs  # out of vLLM's blocks when the step has been computed, before any order of `inner`
    keys: list[list[bytes]]  # of each copy: its hash blocks' keys
    loads: dict[TransferKey, BlockPairs]  # begin in this step: copied into vLLM's blocks when they have arrived
    inner: KVConnectorMetadata  # of the pdkv connector
    peers: PeerChange | None = None


class StagingBooks:
    """The free staging blocks, and the content that they still hold images of.

    A block is in use while its step, a load or a hold of a transfer needs it. Block 0 is never allocated: it stands for
    entries of a block table without an image. The least recently used content is evicted first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._users = [0] * num_blocks
        self._step: list[int] = []  # used by the last step
        self._holds: dict[TransferKey, Sequence[int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self._free)

    def take(self) -> int:
        """Take a free block and forget its content; there must be one."""
        block_id, _ = self._free.popitem(last=False)
        key = self._key_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]
        self._users[block_id] = 1
        return block_id

    def take_for_step(self, key: bytes) -> int:
        """Take a block for an image of the content with that key, until `end_step`."""
        block_id = self.take()
        self._block_of[key] = block_id
        self._key_of[block_id] = key
        self._step.append(block_id)
        return block_id

    def find_for_step(self, key: bytes) -> int | None:
        """The block that is already an image of that content; in use until `end_step`."""
        block_id = self._block_of.get(key)
        if block_id is not None:
            self._use(block_id)
            self._step.append(block_id)
        return block_id

    def end_step(self) -> None:
        """End the step: the workers get the next one, so its copies are held or done."""
        step, self._step = self._step, []
        self.release(step)

    def hold(self, hold: BlockHold) -> None:
        """Hold blocks that a transfer reads."""
        for block_id in hold.block_ids:
            self._use(block_id)
        self._holds[hold.key] = hold.block_ids

    def end_hold(self, key: TransferKey) -> None:
        """End a transfer's hold; unknown ones change nothing."""
        self.release(self._holds.pop(key, ()))

    def release(self, block_ids: Iterable[int]) -> None:
        """Remove one user from each block."""
        for block_id in block_ids:
            self._users[block_id] -= 1
            if not self._users[block_id] and block_id:
                self._free[block_id] = None

    def _use(self, block_id: int) -> None:
        self._free.pop(block_id, None)
        self._users[block_id] += 1

    def check_integrity(self) -> None:
        """Raise AssertionError if free blocks are used, used ones are free, or content is in two places."""
        assert all((self._users[b] == 0) == (b in self._free) for b in range(1, self.num_blocks))
        assert {b: k for k, b in self._block_of.items()} == self._key_of
