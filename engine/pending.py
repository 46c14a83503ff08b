"""A step that its device has been given: what came of it is asked for later."""

from abc import ABC, abstractmethod
from typing import Final

from pdkv.engine.plan import StepOutput

MAX_PENDING: Final = 1
"""Steps that may be unfinished while another one is launched. A request that arrives, or whose KV does, joins the batch
behind those that are launched already, so one more costs it a whole step.
"""


class PendingStep(ABC):
    """One step between its launch and its output. Belongs to the thread that launched it."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the device has computed it. Never blocks.

        Raises:
            RankTimeout: it should have been by now.
        """

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
