"""When a step's KV is in its blocks. Whoever reads computed KV waits for it: that a step is confirmed says nothing.

A device computes behind its host: a step whose chunk draws no token returns, is confirmed and published under content
keys while its kernels still run. The runner makes one StepDone for each plan and carries it to the readers in the
step's metadata.
"""

import threading
import time
from typing import TYPE_CHECKING

from pdkv.errors import TransferTimeout
from pdkv.kernels.streams import Streams, streams_of

if TYPE_CHECKING:
    import torch


class StepDone:
    """One step's end, on a host that has computed what it has returned from: there is nothing to wait for."""

    def record(self) -> None:
        """All of the step's kernels are queued. Called once, on the step thread."""

    def wait(self, timeout_s: float) -> None:
        """Return when the step's KV is in its blocks, for somebody else to read it. On I/O threads.

        Raises:
            TransferTimeout: it is not within that time.
        """

    def wait_on_stream(self, timeout_s: float) -> None:
        """What this thread queues on its current stream from now on comes behind the step. On I/O threads.

        Raises:
            TransferTimeout: the step's kernels were not even queued within that time.
        """


ON_HOST = StepDone()


class StreamStepDone(StepDone):
    """An event of the stream that computes."""

    def __init__(self, streams: Streams) -> None:
        self._event = streams.make_event()
        self._is_recorded = threading.Event()  # to wait for an event before that is to wait for nothing

    def record(self) -> None:
        self._event.record()
        self._is_recorded.set()

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        self._wait_recorded(timeout_s)
        self._event.synchronize(deadline - time.monotonic())

    def wait_on_stream(self, timeout_s: float) -> None:
        self._wait_recorded(timeout_s)
        self._event.wait()

    def _wait_recorded(self, timeout_s: float) -> None:
        if not self._is_recorded.wait(timeout_s):
            raise TransferTimeout(f"a step's kernels were not queued after {timeout_s:g} s")


def make_step_done(device: "torch.device") -> StepDone:
    """The end of a step that computes on that device."""
    streams = streams_of(device)
    return ON_HOST if streams.is_host else StreamStepDone(streams)
