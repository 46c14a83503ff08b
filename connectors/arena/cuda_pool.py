"""Pools on a CUDA device, exported and mapped by CUDA IPC.

Pools are separate allocations: torch's allocator returns parts of segments, and expandable segments cannot be exported
at all.
"""

import logging
import weakref
from collections.abc import Callable

import torch

from pdkv.connectors.arena.device_pool import DevicePoolAddress, PoolDevice
from pdkv.errors import ConfigError, IncompatiblePeers
from pdkv.host import cuda_driver
from pdkv.host.cuda_driver import CudaDriverError

logger = logging.getLogger(__name__)


class CudaPoolDevice(PoolDevice):
    """One CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """`device` has a number."""
        self.device = device
        self.name = _uuid(device.index)

    def _allocate(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        torch.cuda.empty_cache()  # memory that the largest step has left is now the pool's
        try:
            memory = _DeviceMemory.allocate(self.device.index, num_bytes)
            handle = cuda_driver.export_memory(self.device.index, memory.address)
        except CudaDriverError as error:
            hint = "a smaller --kv-cache-memory helps" if error.is_out_of_memory else "--connector nixl does without"
            raise ConfigError(f"cannot share {num_bytes} bytes of {self.device} for KV: {error}; {hint}") from error
        data = memory.as_tensor(self.device).zero_()
        torch.cuda.current_stream(self.device).synchronize()  # other streams may copy from and to it from here on
        return data, handle

    def _map(self, address: DevicePoolAddress) -> torch.Tensor:
        what = f"memory of {address.device} cannot be mapped on {self.name}"
        if len(address.memory) != cuda_driver.HANDLE_BYTES:
            raise IncompatiblePeers(f"{what}: a handle of {len(address.memory)} bytes is not a CUDA handle")
        try:
            memory = _DeviceMemory.map(self.device.index, address.memory, address.num_bytes)
            _check_size(memory, address)
            return memory.as_tensor(_device_of(address.device))
        except (CudaDriverError, RuntimeError) as error:
            raise IncompatiblePeers(f"{what}: {error}") from error


class _DeviceMemory:
    """Memory outside of torch's allocator, in a form that torch accepts: tensors over it keep this object alive."""

    def __init__(self, device: int, address: int, num_bytes: int, release: Callable[[int, int], None]) -> None:
        self.device = device
        self.address = address
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }  # fmt: skip
        weakref.finalize(self, _release, release, device, address).atexit = False  # the driver frees what is left

    @classmethod
    def allocate(cls, device: int, num_bytes: int) -> "_DeviceMemory":
        """A separate allocation. Raises CudaDriverError."""
        return cls(device, cuda_driver.allocate(device, num_bytes), num_bytes, cuda_driver.free)

    @classmethod
    def map(cls, device: int, handle: bytes, num_bytes: int) -> "_DeviceMemory":
        """Map another process's allocation for access from `device`. Raises CudaDriverError."""
        return cls(device, cuda_driver.open_memory(device, handle), num_bytes, cuda_driver.close_memory)

    def as_tensor(self, device: torch.device) -> torch.Tensor:
        """(num_bytes,) uint8, in place. Raises RuntimeError: torch finds the memory on another device."""
        tensor = torch.as_tensor(self, device=device)
        if tensor.data_ptr() != self.address:
            raise RuntimeError(f"torch does not accept it as memory of {device}")
        return tensor


def _release(release: Callable[[int, int], None], device: int, address: int) -> None:
    try:
        release(device, address)
    except CudaDriverError as error:  # the device is as good as lost
        logger.warning("memory of CUDA device %d is not given back: %s", device, error)


def _check_size(memory: _DeviceMemory, address: DevicePoolAddress) -> None:
    """Raise IncompatiblePeers if the driver reports fewer bytes than the peer."""
    try:
        size = cuda_driver.size_from(memory.device, memory.address)
    except CudaDriverError as error:
        logger.debug("the driver does not report the size of a peer's pool: %s", error)
        return
    if size < address.num_bytes:
        raise IncompatiblePeers(f"expected a pool of {address.num_bytes} bytes, got an allocation of {size}")


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _device_of(uuid: str) -> torch.device:
    """The device's number here. Raises RuntimeError if this process does not see it."""
    for number in range(torch.cuda.device_count()):
        if _uuid(number) == uuid:
            return torch.device("cuda", number)
    raise RuntimeError(f"this process cannot see CUDA device {uuid}: CUDA_VISIBLE_DEVICES must include it")
