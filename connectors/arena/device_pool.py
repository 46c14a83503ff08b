"""KV pools in device memory that peers map.

An arena in host memory has the generations, the device has the pool. A reader copies from device to device, and
compares the generations behind the copy as it does in host memory (memory.py). What is published is there: a source's
host has seen the end of the step that computed it.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdkv.connectors.transfer.pool_copy import Pieces
from pdkv.errors import IncompatiblePeers

if TYPE_CHECKING:
    import torch

COPY_BYTES = 256 << 20
"""Between two such parts of a copy a cancel and the deadline are seen."""


class DevicePoolAddress(msgspec.Struct, frozen=True):
    """How a peer on this host gets at a pool; travels in the engine's card."""

    memory: bytes  # what the allocation is opened by
    device: str  # which one it is on, the same in every process
    num_bytes: int


class ExportedPool(NamedTuple):
    """The owner's side."""

    data: "torch.Tensor"  # (num_bytes,) uint8; the allocation lives as long as this
    address: DevicePoolAddress


class PoolDevice(ABC):
    """A device on which pools are exported and mapped. Threads may share it."""

    device: "torch.device"
    name: str
    """The same in every process."""

    def export(self, num_bytes: int) -> ExportedPool:
        """Allocate a pool, zeroed, for peers to map. Raises ConfigError: the memory cannot be had, or not be shared."""
        data, memory = self._allocate(num_bytes)
        return ExportedPool(data, DevicePoolAddress(memory, self.name, num_bytes))

    def open(self, address: DevicePoolAddress, num_bytes: int) -> "torch.Tensor":
        """Map a peer's pool, (num_bytes,) uint8. It is unmapped when nobody refers to it.

        Args:
            num_bytes: that it must have for what its card says.

        Raises:
            IncompatiblePeers: it has another size, or cannot be mapped here.
        """
        if address.num_bytes != num_bytes:
            raise IncompatiblePeers(f"a pool of {address.num_bytes} bytes, where its card means {num_bytes}")
        return self._map(address)

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", pieces: Pieces) -> None:
        """Queue a copy of pieces between two pools, (bytes,) uint8 each, on the current stream.

        Raises:
            TransferError: some of it is not within its pool; nothing is copied.
        """
        from pdkv.kernels.pool_copy import copy_pieces
        from pdkv.kernels.upload import to_tensor

        pieces.check(target.nbytes, source.nbytes)
        to, start = (to_tensor(ids.copy(), self.device) for ids in (pieces.target, pieces.source))
        copy_pieces(target, source, to, start, pieces.rows)

    @abstractmethod
    def _allocate(self, num_bytes: int) -> "tuple[torch.Tensor, bytes]":
        """Zeroed memory, and what peers open it by. Raises ConfigError."""

    @abstractmethod
    def _map(self, address: DevicePoolAddress) -> "torch.Tensor":
        """A peer's memory. Raises IncompatiblePeers."""
