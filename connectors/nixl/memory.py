"""Host memory that peers reach by NIXL: the table of generations, and staging buffers in one region."""

import itertools
import logging
import os
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pdkv.connectors.nixl.agent import Memory
from pdkv.connectors.transfer.planning import Bytes
from pdkv.connectors.transfer.staging import StagingBuffers
from pdkv.host.huge_pages import use_huge_pages
from pdkv.kernels.streams import Streams

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


MAX_LOST = 64
"""The most buffers that are abandoned because something may still be written into them."""

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""torch's names for the setting, the second one since 2.9."""

PAGE_BYTES = 4096
WORD_BYTES = 8


class LandingBuffers(StagingBuffers):
    """Buffers that NIXL reads into.

    Args:
        streams: of the pool's device, for which buffers are pinned.
        register: registers a region with NIXL.
        may_land_late: whether failed reads may. In that case a buffer is not lent again after a failure; a new one
            replaces it, at most MAX_LOST times.
    """

    def __init__(
        self,
        count: int,
        size_bytes: int,
        register: Callable[[Memory], object],
        *,
        may_land_late: bool,
        streams: Streams,
    ) -> None:
        self.lost: list[Bytes] = []
        self._register = register
        self._may_land_late = may_land_late
        super().__init__(count, size_bytes, streams)

    def _allocate(self) -> Bytes:
        buffer = new_region(self.size_bytes, self._streams)
        self._register(region_of(buffer))
        return buffer

    def _after_failure(self, buffer: Bytes) -> Bytes | None:
        if not self._may_land_late:
            return buffer
        self.lost.append(buffer)
        if len(self.lost) <= MAX_LOST:
            return self._allocate()
        logger.error(
            "%d transfers over UCX have not ended, and their buffers cannot be used again: restart this engine",
            len(self.lost),
        )
        return None


class Permit(NamedTuple):
    """A word in a sender's memory: an offer stands as long as the word is `nonce`. Receivers check it after the
    data.
    """

    word: int
    nonce: int


class Permits:
    """Words that peers check. Thread-safe.

    Args:
        values: zeros in memory that peers see. The first one becomes `nonce`, which is unique to this incarnation.
    """

    def __init__(self, values: npt.NDArray[np.int64]) -> None:
        self.values = values
        self.nonce = secrets.randbits(62) + 1
        values[0] = self.nonce
        self._free = list(range(1, values.size))
        self._nonces = itertools.count(1)
        self._lock = threading.Lock()

    def give(self) -> Permit | None:
        """A new permit; None: there are too many."""
        with self._lock:
            if not self._free:
                return None
            permit = Permit(self._free.pop(), next(self._nonces))
            self.values[permit.word] = permit.nonce
            return permit

    def close(self) -> None:
        """Withdraw all permits and release the memory that peers see."""
        with self._lock:
            self.values[:] = 0
            self.values = self.values.copy()
            self._free.clear()

    def withdraw(self, permit: Permit) -> None:
        """Withdraw a permit. Idempotent."""
        with self._lock:
            if self.values[permit.word] == permit.nonce:
                self.values[permit.word] = 0
                self._free.append(permit.word)


class Slots:
    """Memory to gather units in: `count` slots of `slot_bytes`, followed by an int64 generation of each.

    The owner increments a slot's generation before it writes there; a reader reads it after the data. They are pinned
    for the device of `streams`.
    """

    def __init__(self, count: int, slot_bytes: int, streams: Streams) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self.memory = new_region(count * (slot_bytes + WORD_BYTES), streams)
        self._generations = self.memory[count * slot_bytes :].view(np.int64)

    def begin(self, slot: int) -> tuple[Bytes, int]:
        """The slot's memory, which may be written now, and its new generation."""
        self._generations[slot] += 1
        start = slot * self.slot_bytes
        return self.memory[start : start + self.slot_bytes], int(self._generations[slot])


def generation_offset(size_bytes: int, slot_bytes: int, slot: int) -> int:
    """The offset of a slot's generation in a region of this size."""
    return size_bytes // (slot_bytes + WORD_BYTES) * slot_bytes + slot * WORD_BYTES


def new_region(size_bytes: int, streams: Streams) -> Bytes:
    """Zeros in huge pages, if available, all touched: otherwise a transfer would pay for each page with a fault.

    The region is pinned if a device copies from and to it.
    """
    if not streams.is_host:
        pinned: Bytes = streams.make_pinned(size_bytes).numpy()
        pinned.fill(0)
        return pinned
    memory = np.empty(size_bytes, dtype=np.uint8)
    use_huge_pages(memory.ctypes.data, memory.nbytes)
    memory.fill(0)
    return memory


def memory_of(kv_cache: "torch.Tensor") -> Memory:
    """A pool's memory. Warns if a GPU's was mapped in a way that UCX copies slowly or not at all."""
    if kv_cache.device.type == "cpu":
        return Memory(kv_cache.data_ptr(), kv_cache.nbytes)
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            logger.warning(
                "connector nixl: %s has expandable_segments:True. Such memory is many mappings, which UCX registers "
                "badly or not at all, and then copies by way of the host: unset it",
                name,
            )
    return Memory(kv_cache.data_ptr(), kv_cache.nbytes, "VRAM", kv_cache.device.index or 0)


def region_of(array: npt.NDArray[Any]) -> Memory:
    """An array's memory."""
    return Memory(array.ctypes.data, array.nbytes)
