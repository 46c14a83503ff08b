"""When a step's KV is in its blocks. Whoever reads computed KV waits for it.

A device computes behind its host. The runner makes one StepDone for each plan and carries it to the readers in the
step's metadata, with that of the steps whose outputs the plan was made from: those confirm what may be read, and give
free what may be written.
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
        """A step is about to be launched."""
        self._steps.append((step_id, done))

    def up_to(self, step_id: int | None) -> StepDone:
        """The end of that step and of all before it; None: of all that were added. Never asked for less than before."""
        while len(self._steps) > 1 and (step_id is None or self._steps[1][0] <= step_id):
            self._steps.popleft()
        return self._steps[0][1]


def make_step_done(device: "torch.device") -> StepDone:
    """The end of a step that computes on that device."""
    streams = streams_of(device)
    return ON_HOST if streams.is_host else StreamStepDone(streams)
