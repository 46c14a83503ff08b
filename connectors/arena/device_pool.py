"""KV pools in device memory that peers map.

An arena in host memory has the generations, the device has the pool. A reader copies from device to device, and
compares the generations after the copy, as in host memory (arena.py). Published content is complete: the source's host
has seen the end of the step that computed it.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdkv.connectors.transfer.pool_copy import Pieces
from pdkv.errors import IncompatiblePeers

if TYPE_CHECKING:
    import torch

COPY_BYTES = 256 << 20
"""Bytes of a copy between checks for a cancel and the deadline."""


class DevicePoolAddress(msgspec.Struct, frozen=True):
    """How a peer on this host reaches a pool; part of the engine's card."""

    memory: bytes  # the handle of the allocation
    device: str  # the device, by an id that is the same in every process
    num_bytes: int


class ExportedPool(NamedTuple):
    """The pool on its owner's side."""

    data: "torch.Tensor"  # (num_bytes,) uint8; keeps the allocation alive
    address: DevicePoolAddress


class PoolDevice(ABC):
    """A device on which pools are exported and mapped. Threads may share it."""

    device: "torch.device"
    name: str
    """An id that is the same in every process."""

    def export(self, num_bytes: int) -> ExportedPool:
        """Allocate a pool, zeroed, for peers to map. Raises ConfigError if the memory cannot be allocated or shared."""
        data, memory = self._allocate(num_bytes)
        return ExportedPool(data, DevicePoolAddress(memory, self.name, num_bytes))

    def open(self, address: DevicePoolAddress, num_bytes: int) -> "torch.Tensor":
        """Map a peer's pool, (num_bytes,) uint8. It is unmapped once nothing refers to it.

        Args:
            num_bytes: the size that it must have according to its card.

        Raises:
            IncompatiblePeers: the pool has another size, or cannot be mapped here.
        """
        if address.num_bytes != num_bytes:
            raise IncompatiblePeers(f"expected a pool of {num_bytes} bytes, as its card says, got {address.num_bytes}")
        return self._map(address)

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", pieces: Pieces) -> None:
        """Queue a copy of pieces between two pools, (bytes,) uint8 each, on the current stream.

        Raises:
            TransferError: a piece is not within its pool; nothing is copied.
        """
        from pdkv.kernels.pool_copy import copy_pieces
        from pdkv.kernels.upload import to_tensor

        pieces.check(target.nbytes, source.nbytes)
        to, start = (to_tensor(ids.copy(), self.device) for ids in (pieces.target, pieces.source))
        copy_pieces(target, source, to, start, pieces.rows)

    @abstractmethod
    def _allocate(self, num_bytes: int) -> "tuple[torch.Tensor, bytes]":
        """Allocate zeroed memory; returns it and the handle for peers. Raises ConfigError."""

    @abstractmethod
    def _map(self, address: DevicePoolAddress) -> "torch.Tensor":
        """Map a peer's memory. Raises IncompatiblePeers."""
