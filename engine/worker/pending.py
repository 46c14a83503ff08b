"""A step that its device has been given: what came of it is asked for later."""

from abc import ABC, abstractmethod
from typing import Final

from pdkv.connectors.base import NO_TRANSFERS, TransferResults
from pdkv.engine.plan import StepOutput

MAX_PENDING: Final = 1
"""Steps that may be unfinished while another one is launched: with one an H100 does not wait for its host."""


class PendingStep(ABC):
    """One step between its launch and its output. Belongs to the thread that launched it."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the device has computed it. Never blocks.

        Raises:
            RankTimeout: it should have been by now.
        """

    @property
    def has_sends(self) -> bool:
        """Whether its launch found ends of sends, which its output tells."""
        return False

    def take_loads(self) -> TransferResults:
        """Ends of loads that its launch found: its output does not tell them then."""
        return NO_TRANSFERS

    @abstractmethod
    def finish(self) -> StepOutput:
        """Wait for the device, once. Called again it gives the same output.

        Raises:
            RankTimeout: the device has not computed the step in time.
        """


class DoneStep(PendingStep):
    """One whose output is known already: what its launch called has been done."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    @property
    def is_done(self) -> bool:
        return True

    def finish(self) -> StepOutput:
        return self._output
