"""Reads a step's results on the host: copied to pinned memory after the step's work, with one event after the
copies.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from pdkv.base.clock import Clock
from pdkv.engine.worker.pending import MAX_PENDING
from pdkv.errors import RankTimeout, TransferTimeout
from pdkv.kernels.streams import Streams

_SLAB_BYTES = 1 << 18
"""Initial bytes: 512 tokens with 20 logprobs each take half of them."""

_ALIGNMENT = 16

Read = Callable[[Sequence[torch.Tensor]], list[NDArray[Any]]]
"""Reads the contents of tensors on the model's device once all work queued there is done. Raises RankTimeout."""


def read_here(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Read tensors in host memory, whose work is done."""
    return [tensor.numpy() for tensor in tensors]


class _Slab:
    """Pinned memory for the results of one step, reused once they are read."""

    def __init__(self, streams: Streams) -> None:
        self.event = streams.make_event()
        self.is_taken = False
        self._streams = streams
        self._memory = streams.make_pinned(_SLAB_BYTES)

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for each of the tensors."""
        assert not self.is_taken, "more steps are unfinished than MAX_PENDING, and the one that is launched"
        self.is_taken = True
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if sum(sizes) > len(self._memory):
            self._memory = self._streams.make_pinned(2 * sum(sizes))
        stops = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            self._memory[stop - size :][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for tensor, size, stop in zip(tensors, sizes, stops, strict=True)
        ]


class Results:
    """The results of one step."""

    def __init__(
        self, slab: _Slab, copies: Sequence[torch.Tensor], timeout_s: float, num_before: int, clock: Clock
    ) -> None:
        """`num_before`: steps that the device has yet to finish, each of which may take up to `timeout_s`."""
        self.next: Results | None = None  # of the next step
        self._slab = slab
        self._copies = copies
        self._timeout_s = timeout_s
        self._clock = clock
        self._deadline = clock.now() + timeout_s * (num_before + 1)

    @property
    def are_there(self) -> bool:
        """Whether `read` would not wait. Raises RankTimeout if they are overdue."""
        if self._slab.event.query():
            return True
        if self._clock.now() > self._deadline:
            raise self._too_late()
        return False

    def read(self) -> list[NDArray[Any]]:
        """Wait for the results, once; returns copies. Raises RankTimeout."""
        try:
            self._slab.event.synchronize(max(0.0, self._deadline - self._clock.now()))
        except TransferTimeout:
            raise self._too_late() from None
        arrays = [copy.numpy().copy() for copy in self._copies]
        self._slab.is_taken = False
        if self.next is not None:
            self.next._begin()
        return arrays

    def _begin(self) -> None:
        """Note that the device starts computing this step now."""
        self._deadline = self._clock.now() + self._timeout_s

    def _too_late(self) -> RankTimeout:
        return RankTimeout(f"the device has not computed a step within {self._timeout_s:g} s")


class Readback:
    """Results of one device. Several steps may be in flight, each with its own memory; so may early reads of a step."""

    def __init__(self, streams: Streams, timeout_s: float, clock: Clock) -> None:
        """`timeout_s`: the longest time of a step after its launch and the end of the step before it."""
        self._slabs = deque(_Slab(streams) for _ in range(MAX_PENDING + 1))  # least recently used first
        self._slab_within = _Slab(streams)
        self._last: Results | None = None
        self._clock = clock
        self._timeout_s = timeout_s

    def set_timeout(self, timeout_s: float) -> None:
        """Set the timeout of later steps."""
        self._timeout_s = timeout_s

    def begin(self, tensors: Sequence[torch.Tensor]) -> Results:
        """Queue copies of tensors on the device, after all work on the current stream."""
        slab = self._slabs[0]
        self._slabs.rotate(-1)
        results = self._queue(slab, tensors)
        if self._last is not None:
            self._last.next = results
        self._last = results
        return results

    def read(self, tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
        """In the middle of a step: wait for all work on the current stream. Raises RankTimeout."""
        return self._queue(self._slab_within, tensors).read()

    def _queue(self, slab: _Slab, tensors: Sequence[torch.Tensor]) -> Results:
        num_before = sum(other.is_taken for other in self._slabs)
        copies = slab.take(tensors)
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        slab.event.record()
        return Results(slab, copies, self._timeout_s, num_before, self._clock)
