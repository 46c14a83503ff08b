"""Streams and events of the devices that KV lies on: the only way in which pdkv orders work on a device.

A device computes asynchronously, in streams: work queued on one stream runs in order, and two streams are only ordered
by an event that one records and the other waits for. On the CPU all of this is trivial, since calls are synchronous.

    streams = streams_of(kv_cache.device)
    copies, done = streams.make_stream(), streams.make_event()
    with copies.on():
        computed.wait()             # what is queued below runs behind that event
        slab.copy_(kv_cache[3], non_blocking=True)
        done.record()
    done.synchronize(timeout_s)     # now the host may read the slab

tests/support/recorded_streams.py stands in for a device and runs things in the worst order that the events allow.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pdkv.base.clock import MONOTONIC
from pdkv.errors import TransferTimeout
from pdkv.host import cuda_driver

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

logger = logging.getLogger(__name__)


class Event:
    """A point in a stream. It may be recorded again: a wait is for the last record before it. On a host, where calls
    return when their work is done, it is nothing.
    """

    def record(self) -> None:
        """Record the event after the work so far on this thread's current stream."""

    def wait(self) -> None:
        """Order later work on this thread's current stream after the event. Does not block.

        The event must have been recorded.
        """

    def query(self) -> bool:
        """Whether the event has been reached."""
        return True

    def synchronize(self, timeout_s: float) -> None:
        """Wait on the host until the event has been reached.

        Raises:
            TransferTimeout: it was not reached within that time.
        """


class Stream:
    """A queue of work that runs in order, on one device."""

    def on(self) -> AbstractContextManager[Any]:
        """A context in which this is the thread's current stream, and its device the current one."""
        return nullcontext()


class Streams:
    """The streams of one device. The methods are those of a host."""

    is_host: bool
    """What was called has been done: streams and events are nothing."""

    def use(self) -> None:
        """Make the device this thread's current one, for libraries that depend on it."""

    def make_stream(self) -> Stream:
        """A new stream, which does not wait for any other."""
        return Stream()

    def make_event(self) -> Event:
        """An event that has not been recorded."""
        return Event()

    def make_pinned(self, size_bytes: int) -> "torch.Tensor":
        """Host memory that the device copies from and to without the host's help: (size_bytes,) uint8 zeros."""
        import torch

        return torch.zeros(size_bytes, dtype=torch.uint8)

    def lock_pages(self, memory: "npt.NDArray[np.uint8]") -> "Callable[[], None] | None":
        """Make existing host memory such memory. Returns what undoes it; None: it stays as it is."""
        return None


class HostStreams(Streams):
    """The CPU's: calls return when their work is done."""

    is_host = True


HOST: Streams = HostStreams()


def streams_of(device: "torch.device") -> Streams:
    """The streams of a device; for a CUDA device without a number, those of the thread's current one."""
    return _cuda_streams(device) if device.type == "cuda" else HOST


# --- CUDA -------------------------------------------------------------------------------------------------------------


def looks() -> Iterator[float]:
    """Pauses in seconds between polls of a device, since CUDA cannot wait for an event with a deadline."""
    yield from (0.0, 2e-5, 5e-5, 1e-4, 2e-4)
    while True:
        yield 5e-4


class CudaEvent(Event):
    """An event of torch.cuda."""

    def __init__(self, event: "torch.cuda.Event") -> None:
        self._event = event

    def record(self) -> None:
        self._event.record()

    def wait(self) -> None:
        self._event.wait()

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self, timeout_s: float) -> None:
        deadline = MONOTONIC.now() + timeout_s
        for pause_s in looks():
            if self.query():
                return
            if MONOTONIC.now() >= deadline:
                raise TransferTimeout(f"the device has not come to an event within {timeout_s:g} s")
            MONOTONIC.sleep(pause_s)


class _CudaStream(Stream):
    def __init__(self, stream: "torch.cuda.Stream") -> None:
        self._stream = stream

    def on(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(self._stream)


class CudaStreams(Streams):
    """The streams of one CUDA device."""

    is_host = False

    def __init__(self, device: "torch.device") -> None:
        self._device = device

    def use(self) -> None:
        import torch

        torch.cuda.set_device(self._device)

    def make_stream(self) -> Stream:
        import torch

        # Copies go ahead of the blocks of a step's kernels that have not begun.
        return _CudaStream(torch.cuda.Stream(self._device, priority=-1))  # type: ignore[no-untyped-call]

    def make_event(self) -> Event:
        import torch

        return CudaEvent(torch.cuda.Event())  # type: ignore[no-untyped-call]

    def make_pinned(self, size_bytes: int) -> "torch.Tensor":
        import torch

        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)

    def lock_pages(self, memory: "npt.NDArray[np.uint8]") -> "Callable[[], None] | None":
        import torch

        device, address = self._device.index, memory.ctypes.data
        device = torch.cuda.current_device() if device is None else device
        try:
            # Not by the runtime: torch would find its error behind the next kernel.
            cuda_driver.lock_pages(device, address, memory.nbytes)
        except cuda_driver.CudaDriverError as error:
            logger.warning("%d bytes of host memory are not page-locked: %s", memory.nbytes, error)
            return None
        return partial(_unlock_pages, device, address)


def _unlock_pages(device: int, address: int) -> None:
    try:
        cuda_driver.unlock_pages(device, address)
    except cuda_driver.CudaDriverError as error:  # the device is as good as lost
        logger.warning("host memory stays page-locked: %s", error)


@lru_cache(maxsize=64)
def _cuda_streams(device: "torch.device") -> Streams:
    return CudaStreams(device)
