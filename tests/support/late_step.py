"""A step whose KV comes into its blocks behind the host's back, as on a device: not before the test says so."""

import threading

from pdkv.connectors.step_done import StepDone
from pdkv.errors import TransferTimeout

WAIT_S = 60.0


class LateStep(StepDone):
    """Readers that wait are seen by `wait_asked`; they go on after `end`."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._ended = threading.Event()

    def wait(self, timeout_s: float) -> None:
        self._asked.set()
        if not self._ended.wait(min(timeout_s, WAIT_S)):
            raise TransferTimeout("the step has not ended")

    def wait_on_stream(self, timeout_s: float) -> None:
        self.wait(timeout_s)

    def wait_asked(self) -> None:
        """Wait until a reader waits for the step. Fails where none does."""
        assert self._asked.wait(WAIT_S), "nobody waits for the step that computes what is read"

    def end(self) -> None:
        """The blocks are as they shall be."""
        self._ended.set()
