"""What the two sides of the vLLM adapter share: the staging pool's books and a step's orders.

vLLM's blocks belong to vLLM, lie per layer and in its backend's own order. pdkv's connectors see a staging pool
instead, whose blocks are byte images of vLLM's; only whole blocks are saved and loaded, so the order may be any.
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

    copies: BlockPairs  # out of vLLM's blocks when the step has been computed, before anything of `inner`
    keys: list[list[bytes]]  # of each copy: its hash blocks' keys
    loads: dict[TransferKey, BlockPairs]  # that begin in this step: into vLLM's blocks when they are in
    inner: KVConnectorMetadata  # of the pdkv connector
    peers: PeerChange | None = None


class StagingBooks:
    """Which staging blocks are free, and what the last ones of them are still images of.

    A block is in use while its step, a load or a hold of a transfer needs it. Block 0 is never given out: it stands
    where a block table has no image. The least recently used content goes first.
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
        """Take a free block, whose content is forgotten; there must be one."""
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
        """The block that is an image of that content already; in use until `end_step`."""
        block_id = self._block_of.get(key)
        if block_id is not None:
            self._use(block_id)
            self._step.append(block_id)
        return block_id

    def end_step(self) -> None:
        """The workers get the next step after the last one: what that has copied is held or done with."""
        step, self._step = self._step, []
        self.release(step)

    def hold(self, hold: BlockHold) -> None:
        """A transfer reads these blocks."""
        for block_id in hold.block_ids:
            self._use(block_id)
        self._holds[hold.key] = hold.block_ids

    def end_hold(self, key: TransferKey) -> None:
        """A transfer has let go; unknown ones change nothing."""
        self.release(self._holds.pop(key, ()))

    def release(self, block_ids: Iterable[int]) -> None:
        """One user of each block is done with it."""
        for block_id in block_ids:
            self._users[block_id] -= 1
            if not self._users[block_id] and block_id:
                self._free[block_id] = None

    def _use(self, block_id: int) -> None:
        self._free.pop(block_id, None)
        self._users[block_id] += 1

    def check_integrity(self) -> None:
        """Raises AssertionError where free blocks are used, used ones free, or content is in two places."""
        assert all((self._users[b] == 0) == (b in self._free) for b in range(1, self.num_blocks))
        assert {b: k for k, b in self._block_of.items()} == self._key_of
