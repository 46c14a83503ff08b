"""Devices that are the CPU: pools that engines of one process share as those of GPUs are by CUDA IPC.

Streams are those of kernels/streams.py, so that `use_recorded` makes it a device that runs things late.
"""

import itertools
from typing import ClassVar

import pytest
import torch

from pdkv.connectors.arena.device_pool import DevicePoolAddress, PoolDevice
from pdkv.connectors.shared_memory import connector as shared_memory_connector
from pdkv.errors import IncompatiblePeers


class TwinPoolDevice(PoolDevice):
    """A device; handles are numbers of what was exported."""

    _numbers = itertools.count()
    _exported: ClassVar[dict[bytes, torch.Tensor]] = {}

    def __init__(self, name: str = "twin") -> None:
        self.device = torch.device("cpu")
        self.name = name

    def _allocate(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        data = torch.zeros(num_bytes, dtype=torch.uint8)
        handle = str(next(self._numbers)).encode()
        self._exported[handle] = data
        return data, handle

    def _map(self, address: DevicePoolAddress) -> torch.Tensor:
        if address.device != self.name:
            raise IncompatiblePeers(f"memory of {address.device} cannot be mapped on {self.name}: no peer access")
        return self._exported[address.memory]


def use_twin_pools(monkeypatch: pytest.MonkeyPatch, name: str = "twin") -> None:
    """From now on engines whose device is not the CPU have such a one."""

    def make(kind: str) -> PoolDevice | None:
        return None if kind == "cpu" else TwinPoolDevice(name)

    monkeypatch.setattr(shared_memory_connector, "make_pool_device", make)
