"""KV pools in device memory that peers map: exported with events that say when a step's KV is there.

An arena in host memory has the generations, the device has the pool. A reader waits for the events, copies from device
to device, and compares the generations behind the copy as it does in host memory (memory.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from pdkv.connectors.transfer.pool_copy import Pieces
from pdkv.errors import IncompatiblePeers, TransferTimeout
from pdkv.kernels.streams import Event

if TYPE_CHECKING:
    import torch

NUM_EVENTS = 4
"""Two steps may be queued at a time, so that each event has come for half of the time, and for two steps on end."""

COPY_BYTES = 256 << 20
"""Between two such parts of a copy a cancel and the deadline are seen."""


class DevicePoolAddress(msgspec.Struct, frozen=True):
    """How a peer on this host gets at a pool; travels in the engine's card."""

    memory: bytes  # what the allocation is opened by
    events: list[bytes]  # what each event is opened by
    device: str  # which one it is on, the same in every process
    num_bytes: int


class ExportedPool(NamedTuple):
    """The owner's side."""

    data: "torch.Tensor"  # (num_bytes,) uint8; the allocation lives as long as this
    step_done: "StepEvents"  # recorded behind each step, before anything of it is published
    address: DevicePoolAddress


class PeerPool(NamedTuple):
    """The reader's side. Unmapped when nobody refers to it."""

    data: "torch.Tensor"  # (num_bytes,) uint8
    step_done: "StepEvents"


class StepEvents:
    """The events of a pool: its owner records them in turn, one behind each step.

    Readers in other processes look whether they have come: a stream that waited for another process' event would wait
    for ever if that process ended. One event alone would never be seen to have come, where the next step is always
    queued before the last one is over.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self._numbers = cycle(range(len(events)))

    def record(self) -> None:
        """By the owner: the step's kernels are queued."""
        self._events[next(self._numbers)].record()

    def wait(self, timeout_s: Callable[[], float], late: Callable[[], None]) -> None:
        """By a reader: return when all steps are over that were queued when this was called.

        Each event has been seen to have come then, and so the one of the last of these steps.

        Args:
            timeout_s: how long to look before `late` is called, which raises where it is no use to go on.
        """
        for event in self._events:
            while True:
                try:
                    event.synchronize(timeout_s())
                except TransferTimeout:
                    late()
                else:
                    break


class PoolDevice(ABC):
    """A device on which pools are exported and mapped. Threads may share it."""

    device: "torch.device"
    name: str
    """The same in every process."""

    def export(self, num_bytes: int) -> ExportedPool:
        """Allocate a pool, zeroed, for peers to map. Raises ConfigError: the memory cannot be had, or not be shared."""
        data, memory = self._allocate(num_bytes)
        events, handles = zip(*(self._make_event() for _ in range(NUM_EVENTS)), strict=True)
        return ExportedPool(data, StepEvents(events), DevicePoolAddress(memory, list(handles), self.name, num_bytes))

    def open(self, address: DevicePoolAddress, num_bytes: int) -> PeerPool:
        """Map a peer's pool.

        Args:
            num_bytes: that it must have for what its card says.

        Raises:
            IncompatiblePeers: it has another size, or cannot be mapped here.
        """
        if address.num_bytes != num_bytes:
            raise IncompatiblePeers(f"a pool of {address.num_bytes} bytes, where its card means {num_bytes}")
        if len(address.events) != NUM_EVENTS:
            raise IncompatiblePeers(f"a pool with {len(address.events)} events, where {NUM_EVENTS} are expected")
        events = [self._open_event(address, handle) for handle in address.events]
        return PeerPool(self._map(address), StepEvents(events))

    def copy(self, target: "torch.Tensor", source: "torch.Tensor", pieces: Pieces) -> None:
        """Queue a copy of pieces between two pools, (bytes,) uint8 each, on the current stream.

        Raises:
            TransferError: some of it is not within its pool; nothing is copied.
        """
        import torch

        from pdkv.kernels.pool_copy import copy_pieces

        pieces.check(target.nbytes, source.nbytes)
        to, start = (torch.from_numpy(ids.copy()).to(self.device) for ids in (pieces.target, pieces.source))
        copy_pieces(target, source, to, start, pieces.rows)

    @abstractmethod
    def _allocate(self, num_bytes: int) -> "tuple[torch.Tensor, bytes]":
        """Zeroed memory, and what peers open it by. Raises ConfigError."""

    @abstractmethod
    def _make_event(self) -> tuple[Event, bytes]:
        """An event, and what peers open it by. Raises ConfigError."""

    @abstractmethod
    def _map(self, address: DevicePoolAddress) -> "torch.Tensor":
        """A peer's memory. Raises IncompatiblePeers."""

    @abstractmethod
    def _open_event(self, address: DevicePoolAddress, handle: bytes) -> Event:
        """A peer's event. Raises IncompatiblePeers."""
