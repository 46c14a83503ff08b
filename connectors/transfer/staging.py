"""A bounded pool of staging buffers, allocated once and lent to one job at a time."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from pdkv.connectors.transfer.planning import Bytes
from pdkv.errors import TransferTimeout
from pdkv.kernels.streams import Streams


class StagingBuffers:
    """`count` buffers of `size_bytes`. Thread-safe; a caller that finds none waits, with a deadline.

    Args:
        streams: the streams of the device that copies from and to the buffers, which are pinned for it.
    """

    def __init__(self, count: int, size_bytes: int, streams: Streams) -> None:
        self.count = count
        self.size_bytes = size_bytes
        self._free: queue.LifoQueue[Bytes] = queue.LifoQueue()  # the last one used is in the processor's cache
        self._streams = streams
        for _ in range(count):
            self._free.put(self._allocate())

    @property
    def num_free(self) -> int:
        """Number of buffers that are not lent."""
        return self._free.qsize()

    @contextmanager
    def take(self, timeout_s: float) -> Iterator[Bytes]:
        """Borrow a buffer of shape (size_bytes,), uint8.

        Raises:
            TransferTimeout: all buffers stay in use for that long.
        """
        try:
            buffer = self._free.get(timeout=timeout_s)
        except queue.Empty:
            raise TransferTimeout(f"no staging buffer became free within {timeout_s:g} s") from None
        try:
            yield buffer
        except BaseException:
            self._put(self._after_failure(buffer))
            raise
        self._put(buffer)

    def _put(self, buffer: Bytes | None) -> None:
        if buffer is not None:
            self._free.put(buffer)

    def _after_failure(self, buffer: Bytes) -> Bytes | None:
        """The buffer that replaces one from a failed job."""
        return buffer

    def _allocate(self) -> Bytes:
        if self._streams.is_host:
            return np.zeros(self.size_bytes, dtype=np.uint8)
        buffer: Bytes = self._streams.make_pinned(self.size_bytes).numpy()
        return buffer
