"""Events on one of the kit's engines that its connector has not been told of yet."""

from collections.abc import Sequence

from pdkv.connectors.base import Cancel, ConfirmedRange, ScheduledRange, SchedulerView, TransferKey


class News:
    """Events collected between two steps; a step's view takes all of them."""

    def __init__(self) -> None:
        self.confirmed: list[ConfirmedRange] = []
        self.preempted: list[TransferKey] = []
        self.finished: list[TransferKey] = []
        self.aborted: list[TransferKey] = []
        self.cancels: list[Cancel] = []
        self.kept: list[Sequence[int]] = []  # blocks of finished requests, until the connector has been told of them

    def __bool__(self) -> bool:
        return bool(self.confirmed or self.preempted or self.finished or self.aborted or self.cancels)

    def retract(self, key: TransferKey) -> None:
        """Withdraw confirmed tokens: the blocks may have another owner by the next view."""
        self.confirmed = [confirmed for confirmed in self.confirmed if confirmed.request.transfer_key != key]

    def cancel(self, cancel: Cancel) -> None:
        """Tell the workers to cancel with the next step."""
        if cancel not in self.cancels:
            self.cancels.append(cancel)

    def view(self, step_id: int, scheduled: Sequence[ScheduledRange]) -> SchedulerView:
        """The view of one step, with all events since the last one."""
        return SchedulerView(
            step_id=step_id,
            scheduled=scheduled,
            confirmed=self.confirmed,
            preempted=self.preempted,
            finished=self.finished,
            aborted=self.aborted,
            waiting_keys=[],
            cancelled=[cancel.key for cancel in self.cancels if cancel.direction == "receive"],
        )
