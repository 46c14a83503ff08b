"""The worker side of all transports: jobs on I/O threads, deadlines, cancel, results.

A transfer, named by (transfer_id, attempt), consists of one or more jobs, and has ended when all of them have. The step
thread submits jobs and collects results. I/O threads run them, those of one lane in order. A *posted* job has no
thread: the transport ends it when the peer has done its part.
"""

import logging
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import (
    NO_TRANSFERS,
    Direction,
    Stats,
    TransferKey,
    TransferOutcome,
    TransferResults,
    WorkerConnector,
)
from pdkv.connectors.stats import stats_of_transfer
from pdkv.connectors.transfer.jobs import Batch, Transfer
from pdkv.connectors.transfer.jobs import Job as Job  # subclasses need these two
from pdkv.connectors.transfer.jobs import Task as Task
from pdkv.connectors.transfer.lanes import IOLanes, Lane, LaneConfig
from pdkv.errors import PdkvError, TransferCancelled, TransferError, TransferTimeout
from pdkv.wire.reports import ConnectorStats

logger = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 5.0
MAX_UNEXPECTED_ERRORS = 64
"""Kinds of unexpected errors that are each logged once; further kinds are not logged."""

MAX_FAILED_SENDS = 4096
"""Failed sends to remember, so that their later batches fail, too."""


class TransferWorker(WorkerConnector):
    """Base class of worker sides. Subclasses turn orders into tasks and run jobs.

    Args:
        timeout_s: a job's deadline, from its submission on, unless its task has its own.
        lanes: numbers of threads, and their lifetimes.
        clock: the clock of the deadlines.
    """

    def __init__(
        self, notify: Callable[[], None], *, timeout_s: float, lanes: LaneConfig, clock: Clock = MONOTONIC
    ) -> None:
        self.clock = clock
        self.num_unknown_keys = 0  # cancels and duplicate orders without effect
        self.num_unexpected_errors = 0  # of jobs, with errors that are not in errors.py
        self._unexpected_errors: set[tuple[Any, ...]] = set()  # kinds that have been logged
        self.timeout_s = timeout_s
        self._notify = notify
        self._lock = threading.Lock()  # guards everything below, and the states of jobs
        self._transfers: dict[tuple[Direction, TransferKey], Transfer] = {}
        self._failed_sends: OrderedDict[TransferKey, str] = OrderedDict()
        self._results: dict[str, dict[TransferKey, TransferOutcome]] = {}
        self._stats = ConnectorStats()
        self._next_deadline = inf
        self._stopping = False
        self.lanes: IOLanes[Job] = IOLanes(
            lanes,
            self._run,
            refuse=self._refuse_job,
            make_scratch=self.make_scratch,
            close_scratch=self.close_scratch,
            do_idle_work=self.do_idle_work,
        )

    def start_threads(self, own: Iterable[Lane] = ()) -> None:
        """Called by the subclass when it can run jobs. `own`: private lanes that get their threads from now on."""
        self.lanes.start(own)

    # --- what a transport implements ------------------------------------------------------------------------------

    @abstractmethod
    def run_job(self, job: Job, scratch: Any) -> int | None:
        """Run on an I/O thread, which it may block up to the job's deadline; calls `job.check` now and then.

        Returns:
            The bytes moved, or None: the job is posted now, and `end_job` will end it.

        Raises:
            TransferError: it failed, and nothing touches its blocks any more.
        """

    def interrupt(self, job: Job) -> bool:
        """Make the transport release a running or posted job that must stop (`job.stop_code`). Must not block.

        Returns:
            For a posted job: True if only threads between `enter` and `leave` can still touch its blocks, so that it
            ends with the last `leave`; False if the transport will call `let_go`. A running job ends when run_job
            returns.
        """
        return True

    def make_scratch(self, lane: Lane) -> Any:
        """Make the state of a thread, such as buffers or a connection. Called on that thread."""
        return None

    def close_scratch(self, lane: Lane, scratch: Any) -> None:
        """Release the result of `make_scratch`. Called on the same thread, when it ends."""

    def ended(self, transfer: Transfer, outcome: TransferOutcome) -> TransferOutcome:
        """Make the report of a transfer when all of its jobs have ended. Called under the lock: must not block."""
        return outcome

    def do_idle_work(self) -> bool:
        """Do a little work on threads of the shared lane that have no job; False: there is none."""
        return False

    # --- the step thread ------------------------------------------------------------------------------------------

    def submit(
        self,
        key: TransferKey,
        direction: Direction,
        tasks: Iterable[Task],
        *,
        batch: TransferKey | None = None,
        last: bool = True,
        continues: bool = False,
    ) -> list[Job]:
        """Queue one batch of a transfer.

        Args:
            tasks: if empty, this rank has nothing to do for the batch, which ends at once.
            batch: a name under which the batch is reported as well, when its jobs have ended.
            last: the transfer is complete with this batch.
            continues: it belongs to a transfer under way; if that has ended, nothing is done, and nothing reported.

        Returns:
            The jobs; none if there is nothing to do, or the transfer has failed or is complete: a new batch of such a
            transfer fails, a repeated order is only counted.
        """
        now = self.clock.now()
        with self._lock:
            transfer = self._transfers.get((direction, key))
            group = Batch(batch, started=now)
            if transfer is None and continues:
                return []
            if transfer is not None and transfer.complete:
                self.num_unknown_keys += 1
                code = TransferError.code
                if batch not in transfer.batches:
                    transfer.batches.add(batch)
                    self._report_batch(direction, group, transfer.code or code)
            elif code := self._refusal(key, direction, transfer):
                self._report_batch(direction, group, code)
            else:
                if transfer is None:
                    transfer = self._transfers[direction, key] = Transfer(key, direction, now, self.clock)
                elif continues and not transfer.jobs:
                    transfer.started += now - transfer.rested  # a wait for the peer is no part of its seconds
                transfer.complete = last
                transfer.batches.add(batch)
                jobs = self._make_jobs(transfer, group, tasks)
        self._notify_results()
        return [] if code else jobs

    def start_jobs(self, jobs: Iterable[Job]) -> None:
        """Queue posted jobs that have not ended, now that what they waited for has arrived. Their deadline counts from
        now.
        """
        now = self.clock.now()
        with self._lock:
            for job in jobs:
                if job.state == "posted" and not job.stop_code:
                    job.state, job.started, job.deadline = "queued", now, now + self.timeout_s
                    self._next_deadline = min(self._next_deadline, job.deadline)
                    self.lanes.put(job.lane, job)

    def refuse(self, key: TransferKey, direction: Direction, code: str, *, batch: TransferKey | None = None) -> None:
        """Fail the transfer of a batch that cannot even begin."""
        for job in self.submit(key, direction, [Task(None, posted=True)], batch=batch, last=False):
            self.end_job(job, code)

    def get_finished(self) -> TransferResults:
        if self.clock.now() >= self._next_deadline:
            self._expire()
        if not self._results:  # `notify` comes after a result
            return NO_TRANSFERS
        with self._lock:
            results, self._results = self._results, {}
        names = ("finished_send", "failed_send", "finished_receive", "failed_receive")
        return TransferResults(*(results.get(name, {}) for name in names))

    def get_stats(self) -> Stats:
        with self._lock:
            return {"": self._stats}

    def cancel(self, key: TransferKey, direction: Direction) -> None:
        """Cancel a transfer: queued jobs end at once, running ones when the transport has released them; then
        it fails.
        """
        if not self.drop(key, direction):
            self.num_unknown_keys += 1

    def drop(self, key: TransferKey, direction: Direction) -> bool:
        """As `cancel`; returns False if there is no such transfer (any more)."""
        with self._lock:
            transfer = self._transfers.get((direction, key))
            stopped = self._fail(transfer, TransferCancelled.code) if transfer is not None else []
        self._interrupt(stopped)
        self._notify_results()
        return transfer is not None

    def complete(self, key: TransferKey, direction: Direction) -> None:
        """Note that no further batch will come: a transfer in progress ends with what it has."""
        with self._lock:
            transfer = self._transfers.get((direction, key))
            if transfer is not None:
                transfer.complete = True
                self._settle(transfer)
        self._notify_results()

    def shutdown(self) -> None:
        """Stop all jobs and join the threads, for a limited time. Idempotent."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            transfers = list(self._transfers.values())
            stopped = [job for transfer in transfers for job in self._fail(transfer, TransferCancelled.code)]
        self._interrupt(stopped)
        self.lanes.shutdown(JOIN_TIMEOUT_S)

    # --- any thread -----------------------------------------------------------------------------------------------

    def open_jobs(self, key: TransferKey, direction: Direction) -> list[Job]:
        """A transfer's jobs that have not ended."""
        with self._lock:
            transfer = self._transfers.get((direction, key))
            return list(transfer.jobs) if transfer is not None else []

    def end_job(self, job: Job, code: str = "", num_bytes: int = 0) -> None:
        """End a posted job: nothing touches its blocks any more. A job that has ended stays ended."""
        with self._lock:
            stopped = self._end(job, code, num_bytes)
        self._interrupt(stopped)
        self._notify_results()

    def let_go(self, job: Job) -> None:
        """Note that the blocks of a stopped job, which might still be touched after its `interrupt`, are not touched
        any more.
        """
        with self._lock:
            job.let_go = True
            self._end_if_free(job)
        self._notify_results()

    def wake_if_late(self) -> None:
        """If a deadline has passed, let the engine step and collect. For a transport thread that checks often."""
        if self.clock.now() >= self._next_deadline:
            self._notify()

    def enter(self, job: Job) -> bool:
        """Begin to use a posted job's blocks; False: the job has ended or must stop, and they must not be used.

        A running job counts as about to be posted, since the transport may be faster than its return.
        """
        with self._lock:
            if job.state not in ("running", "posted") or job.stop_code:
                return False
            job.num_users += 1
            return True

    def leave(self, job: Job) -> None:
        """End what `enter` began; a job that had to stop in the meantime ends with its last user."""
        with self._lock:
            job.num_users -= 1
            self._end_if_free(job)
        self._notify_results()

    def stop_jobs(self, wanted: Callable[[Job], bool], code: str) -> None:
        """Fail the transfers of all open jobs that `wanted` accepts, as `cancel` does, with another code."""
        with self._lock:
            found = [t for t in self._transfers.values() if any(wanted(job) for job in t.jobs)]
            stopped = [job for transfer in found for job in self._fail(transfer, code)]
        self._interrupt(stopped)
        self._notify_results()

    @property
    def num_open_jobs(self) -> int:
        """Number of jobs that have not ended."""
        with self._lock:
            return sum(len(transfer.jobs) for transfer in self._transfers.values())

    # --- under the lock -------------------------------------------------------------------------------------------

    def _refusal(self, key: TransferKey, direction: Direction, transfer: Transfer | None) -> str:
        """The code with which a new batch fails at once; empty: it may begin."""
        if transfer is not None:
            return transfer.code
        if direction == "send" and key in self._failed_sends:  # its end was reported
            return self._failed_sends[key]
        if self._stopping:
            self._report(direction, key, TransferCancelled.code, 0, self.clock.now())
            return TransferCancelled.code
        return ""

    def _make_jobs(self, transfer: Transfer, group: Batch, tasks: Iterable[Task]) -> list[Job]:
        """Make jobs from tasks, and queue those that are not posted."""
        now = group.started
        jobs = [
            Job(
                task.order,
                task.lane,
                transfer,
                group,
                now,
                now + (self.timeout_s if task.timeout_s is None else task.timeout_s),
                "posted" if task.posted else "queued",
            )
            for task in tasks
        ]
        group.num_open = len(jobs)
        transfer.jobs.update(jobs)
        if jobs:
            self._next_deadline = min(self._next_deadline, *(job.deadline for job in jobs))
        else:
            self._report_batch(transfer.direction, group, "")
            self._settle(transfer)
        for job in jobs:
            if job.state == "queued":
                self.lanes.put(job.lane, job)
        return jobs

    def _fail(self, transfer: Transfer, code: str) -> list[Job]:
        """Stop all of a transfer. Returns the jobs that the transport must release."""
        transfer.code = transfer.code or code
        stopped = []
        for job in list(transfer.jobs):
            if job.state == "queued":
                self._end(job, code, 0)
            elif not job.stop_code:
                job.stop_code = code
                stopped.append(job)
        self._settle(transfer)
        return stopped

    def _end(self, job: Job, code: str, num_bytes: int) -> list[Job]:
        """End a job. Returns the transfer's other jobs, which must stop if it failed."""
        transfer, batch = job.transfer, job.batch
        if job.state == "ended":
            return []
        job.state = "ended"
        transfer.jobs.discard(job)
        transfer.rested = self.clock.now()
        transfer.num_bytes += num_bytes
        batch.num_bytes += num_bytes
        batch.num_open -= 1
        batch.code = batch.code or code
        if not batch.num_open:
            self._report_batch(transfer.direction, batch, batch.code or transfer.code)
        if code and not transfer.code:
            return self._fail(transfer, code)
        self._settle(transfer)
        return []

    def _end_if_free(self, job: Job) -> None:
        """End a posted job that must stop, if nothing touches its blocks."""
        if job.stop_code and job.state == "posted" and job.let_go and not job.num_users:
            self._end(job, job.stop_code, 0)

    def _settle(self, transfer: Transfer) -> None:
        """Report the transfer if it has ended."""
        if transfer.jobs or not (transfer.complete or transfer.code):
            return
        if self._transfers.pop((transfer.direction, transfer.key), None) is None:
            return
        outcome = TransferOutcome(transfer.code, transfer.num_bytes, self.clock.now() - transfer.started)
        outcome = self.ended(transfer, outcome)
        self._stats += stats_of_transfer(transfer.direction, outcome)
        self._put_result(transfer.direction, transfer.key, outcome)
        if transfer.code and transfer.direction == "send":
            self._failed_sends[transfer.key] = transfer.code
            if len(self._failed_sends) > MAX_FAILED_SENDS:
                self._failed_sends.popitem(last=False)

    def _report_batch(self, direction: Direction, batch: Batch, code: str) -> None:
        if batch.name is not None:
            self._report(direction, batch.name, code, batch.num_bytes, batch.started)

    def _report(self, direction: Direction, key: TransferKey, code: str, num_bytes: int, started: float) -> None:
        self._put_result(direction, key, TransferOutcome(code, num_bytes, self.clock.now() - started))

    def _put_result(self, direction: Direction, key: TransferKey, outcome: TransferOutcome) -> None:
        name = f"{'failed' if outcome.code else 'finished'}_{direction}"
        self._results.setdefault(name, {})[key] = outcome

    # --- deadlines ------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """End queued jobs past their deadline, and tell the transport of the others."""
        now = self.clock.now()
        with self._lock:
            open_jobs = [job for transfer in self._transfers.values() for job in transfer.jobs]
            late = [job for job in open_jobs if job.deadline <= now and not job.stop_code]
            stopped = []
            for transfer in {id(job.transfer): job.transfer for job in late}.values():
                stopped += self._fail(transfer, TransferTimeout.code)
            deadlines = (job.deadline for job in open_jobs if not job.stop_code and job.state != "ended")
            self._next_deadline = min(deadlines, default=inf)
        self._interrupt(stopped)
        self._notify_results()

    def _interrupt(self, stopped: list[Job]) -> None:
        """Outside the lock: tell the transport, and end jobs that it does not touch any more."""
        for job in stopped:
            free = self.interrupt(job)
            with self._lock:
                job.let_go = job.let_go or free
                self._end_if_free(job)

    def _notify_results(self) -> None:
        if self._results:
            self._notify()

    # --- I/O threads ----------------------------------------------------------------------------------------------

    def _refuse_job(self, job: Job, error: Exception) -> None:
        """Refuse a job for which its lane has no thread state."""
        with self._lock:
            if job.state != "queued":
                return
            stopped = self._end(job, error.code if isinstance(error, PdkvError) else TransferError.code, 0)
        self._interrupt(stopped)
        self._notify_results()

    def _log_unexpected(self, job: Job, error: Exception) -> None:
        """Log an unexpected error with a traceback, but each kind at each place only once: later ones would be the
        same.
        """
        self.num_unexpected_errors += 1
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        kind = (type(error), where.tb_frame.f_code if where else None, where.tb_lineno if where else 0)
        with self._lock:
            known = kind in self._unexpected_errors or len(self._unexpected_errors) >= MAX_UNEXPECTED_ERRORS
            self._unexpected_errors.add(kind)
        if known:
            logger.debug("%s %s: %r", job.transfer.direction, job.key, error)
        else:
            logger.error("%s %s failed; not reported again", job.transfer.direction, job.key, exc_info=error)

    def _run(self, job: Job, scratch: Any) -> None:
        with self._lock:
            if job.state != "queued":
                return  # ended while it waited
            job.state = "running"
        code, num_bytes = "", None
        try:
            job.check()
            num_bytes = self.run_job(job, scratch)
        except PdkvError as error:
            code = error.code
            logger.debug("%s %s: %s", job.transfer.direction, job.key, error)
        except Exception as error:  # whatever the error was, the thread serves the next job, and the request gets it
            code = TransferError.code
            self._log_unexpected(job, error)
        with self._lock:
            if job not in job.transfer.jobs:  # `end_job` was faster than the return of run_job
                return
            if num_bytes is None and not code:
                job.state = "posted"
                stopped = [job] if job.stop_code else []
            else:  # the error of an interrupted transport is not why it failed
                stopped = self._end(job, code and (job.stop_code or code), num_bytes or 0)
        self._interrupt(stopped)
        self._notify_results()
