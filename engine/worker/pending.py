"""A step that its device is computing; its results are fetched later."""

from abc import ABC, abstractmethod
from typing import Final

from pdkv.connectors.base import NO_TRANSFERS, TransferResults
from pdkv.engine.plan import StepOutput

MAX_PENDING: Final = 1
"""Steps that may be unfinished while another one is launched: with one, an H100 does not wait for its host."""


class PendingStep(ABC):
    """One step between its launch and its output. Belongs to the thread that launched it."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the device has computed it. Never blocks.

        Raises:
            RankTimeout: it is overdue.
        """

    @property
    def has_sends(self) -> bool:
        """Whether the step's launch found ended sends, which its output reports."""
        return False

    def take_loads(self) -> TransferResults:
        """Ended loads that the step's launch found: its output then does not report them."""
        return NO_TRANSFERS

    @abstractmethod
    def finish(self) -> StepOutput:
        """Wait for the device, once. Further calls return the same output.

        Raises:
            RankTimeout: the device has not computed the step in time.
        """


class DoneStep(PendingStep):
    """A step with its output already known: everything its launch called is done."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    @property
    def is_done(self) -> bool:
        return True

    def finish(self) -> StepOutput:
        return self._output
