"""The worker side's records of transfers: their batches and jobs, with deadlines and reasons to stop."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pdkv.base.clock import Clock
from pdkv.connectors.base import Direction, TransferKey
from pdkv.connectors.transfer.lanes import SHARED_LANE, Lane
from pdkv.errors import TransferCancelled, TransferTimeout


class Task(NamedTuple):
    """The input from which `TransferWorker.submit` makes a job."""

    order: Any  # for run_job
    lane: Lane = SHARED_LANE  # jobs of one lane run one after the other
    posted: bool = False  # no thread runs it: `end_job` ends it
    timeout_s: float | None = None  # None: the worker's


@dataclass(eq=False, slots=True)
class Batch:
    """Jobs that are reported together, under their own name; the engine holds the blocks that they read."""

    name: TransferKey | None
    num_open: int = 0
    num_bytes: int = 0
    started: float = 0.0
    code: str = ""


@dataclass(eq=False, slots=True)
class Transfer:
    """One transfer in one direction, with all of its batches."""

    key: TransferKey
    direction: Direction
    started: float
    clock: Clock  # of its worker
    rested: float = 0.0  # when its last job ended
    jobs: set["Job"] = field(default_factory=set)  # not ended
    complete: bool = False  # no further batch will come
    batches: set[TransferKey | None] = field(default_factory=set)  # names of all so far
    num_bytes: int = 0
    code: str = ""  # of the first failure


@dataclass(eq=False, slots=True)
class Job:
    """One piece of a transfer. Its state and `stop_code` change under the worker's lock; threads may read them."""

    order: Any
    lane: Lane
    transfer: Transfer
    batch: Batch
    started: float
    deadline: float
    state: Literal["queued", "running", "posted", "ended"] = "queued"
    stop_code: str = ""  # why it must stop; empty while it may continue
    num_users: int = 0  # threads that are touching a posted job's blocks
    let_go: bool = False  # the transport has said that only those still touch its blocks

    @property
    def key(self) -> TransferKey:
        """The name of its transfer."""
        return self.transfer.key

    @property
    def clock(self) -> Clock:
        """The clock of its deadline."""
        return self.transfer.clock

    def check(self) -> None:
        """Return if the job may continue. To be called between two pieces of work.

        Raises:
            TransferCancelled: the transfer was given up.
            TransferTimeout: its deadline has passed.
        """
        if self.stop_code and self.stop_code != TransferTimeout.code:
            raise TransferCancelled("cancelled", key=self.key)
        if self.stop_code or self.clock.now() >= self.deadline:
            limit = self.deadline - self.started
            raise TransferTimeout(f"not done after {limit:g} s", key=self.key)

    def remaining_s(self) -> float:
        """Seconds until the deadline, above 0. Raises the same as `check`."""
        self.check()
        return max(self.deadline - self.clock.now(), 1e-3)
