"""A step that its device is computing; its results are fetched later."""

from abc import ABC, abstractmethod
from typing import Final

import msgspec

from pdkv.connectors.base import NO_TRANSFERS, TransferResults
from pdkv.engine.plan import StepOutput

MAX_PENDING: Final = 2
"""Steps that may be unfinished while another one is launched. With one, an H100 does not wait for its host; with as
many as are planned ahead, every plan's loads begin at once.
"""

LOOK_S: Final = 1e-4
"""Seconds to wait for an order while a device computes before the device is checked again."""


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
        self._rest = output

    @property
    def is_done(self) -> bool:
        return True

    @property
    def has_sends(self) -> bool:
        return self._rest.transfers.has_sends

    def take_loads(self) -> TransferResults:
        sent, sent_badly, loaded, loaded_badly = self._rest.transfers
        if not (loaded or loaded_badly):
            return NO_TRANSFERS
        self._rest = msgspec.structs.replace(self._rest, transfers=TransferResults(sent, sent_badly, {}, {}))
        return TransferResults({}, {}, loaded, loaded_badly)

    def finish(self) -> StepOutput:
        return self._rest
