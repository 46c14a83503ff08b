"""The moment when a step's KV is in its blocks. Readers of computed KV wait for it.

A device runs asynchronously to its host. The runner makes one StepDone for each plan and passes it to the readers in
the step's metadata, together with that of the steps from whose outputs the plan was made: those steps confirm what may
be read, and free what may be written.
"""

import threading
from collections import deque
from typing import TYPE_CHECKING

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.errors import TransferTimeout
from pdkv.kernels.streams import Streams, streams_of

if TYPE_CHECKING:
    import torch


class StepDone:
    """One step's end on a synchronous host, for which there is nothing to wait."""

    def record(self) -> None:
        """Note that all of the step's kernels are queued. Called once, on the step thread."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the step's KV is in its blocks, readable from elsewhere. For I/O threads.

        Raises:
            TransferTimeout: the KV is not there within that time.
        """

    def wait_on_stream(self, timeout_s: float) -> None:
        """Order later work on this thread's current stream after the step. For I/O threads.

        Raises:
            TransferTimeout: the step's kernels were not even queued within that time.
        """


ON_HOST = StepDone()


class StreamStepDone(StepDone):
    """An event of the stream that computes."""

    def __init__(self, streams: Streams, clock: Clock = MONOTONIC) -> None:
        self._clock = clock
        self._event = streams.make_event()
        self._is_recorded = threading.Event()  # to wait for an event before that is to wait for nothing

    def record(self) -> None:
        self._event.record()
        self._is_recorded.set()

    def wait(self, timeout_s: float) -> None:
        deadline = self._clock.now() + timeout_s
        self._wait_recorded(timeout_s)
        self._event.synchronize(deadline - self._clock.now())

    def wait_on_stream(self, timeout_s: float) -> None:
        self._wait_recorded(timeout_s)
        self._event.wait()

    def _wait_recorded(self, timeout_s: float) -> None:
        if not self._clock.wait(self._is_recorded, self._clock.now() + timeout_s):
            raise TransferTimeout(f"a step's kernels were not queued after {timeout_s:g} s")


class StepsDone:
    """The ends of an engine's latest steps, in order."""

    def __init__(self) -> None:
        self._steps: deque[tuple[int, StepDone]] = deque([(-1, ON_HOST)])

    def add(self, step_id: int, done: StepDone) -> None:
        """Add a step that is about to be launched."""
        self._steps.append((step_id, done))

    def up_to(self, step_id: int | None) -> StepDone:
        """The end of that step and of all before it; None: of all added steps. Requests never go back to
        earlier steps.
        """
        while len(self._steps) > 1 and (step_id is None or self._steps[1][0] <= step_id):
            self._steps.popleft()
        return self._steps[0][1]


def make_step_done(device: "torch.device") -> StepDone:
    """A StepDone for a step that computes on that device."""
    streams = streams_of(device)
    return ON_HOST if streams.is_host else StreamStepDone(streams)
