"""Throttles a connector's transport: its I/O threads wait, as they would for a slow peer."""

import threading
from collections.abc import Callable
from typing import Any

from pdkv.base.clock import MONOTONIC
from pdkv.connectors.base import NO_TRANSFERS, TransferKey, TransferOutcome, TransferResults, WorkerConnector
from pdkv.connectors.peer.push_worker import PushPiece, PushWorker
from pdkv.connectors.transfer.worker import Job, TransferWorker


def throttle(worker: WorkerConnector, bytes_per_s: float) -> Callable[[], None]:
    """Throttle a worker side; returns an object that ends it.

    For a side that is not a TransferWorker, the reported bytes are trusted, and its results are withheld for as long.
    """
    slow = _SlowJobs(worker, bytes_per_s) if isinstance(worker, TransferWorker) else _SlowResults(worker, bytes_per_s)
    return slow.end


class _SlowJobs:
    """Throttles run_job: all of the worker's threads share the rate."""

    def __init__(self, worker: TransferWorker, bytes_per_s: float) -> None:
        self._run_job = worker.run_job
        self._rate = bytes_per_s
        self._ended = threading.Event()
        self._wire = threading.Lock()
        self._worker = worker
        worker.run_job = self._run  # type: ignore[method-assign]

    def end(self) -> None:
        """End throttling: waiting threads continue, and later jobs run at full speed. Idempotent."""
        self._ended.set()
        self._worker.run_job = self._run_job  # type: ignore[method-assign]

    def _run(self, job: Job, scratch: Any) -> int | None:
        if isinstance(job.order, PushPiece):  # waits before the job: it may be posted, and its end reported at once
            self._wait(_push_bytes(self._worker, job.order))
            return self._run_job(job, scratch)
        num_bytes = self._run_job(job, scratch)
        self._wait(num_bytes or 0)
        return num_bytes

    def _wait(self, num_bytes: int) -> None:
        with self._wire:
            MONOTONIC.wait(self._ended, MONOTONIC.now() + num_bytes / self._rate)


def _push_bytes(worker: TransferWorker, piece: PushPiece) -> int:
    assert isinstance(worker, PushWorker)
    layout = worker.config.layout
    num_bytes = (piece.send.stop - piece.send.start) * layout.token_bytes
    return num_bytes * len(piece.layers) // layout.num_layers


class _SlowResults:
    """Throttles get_finished: an outcome is reported when its bytes could have been moved."""

    def __init__(self, worker: WorkerConnector, bytes_per_s: float) -> None:
        self._worker = worker
        self._get_finished = worker.get_finished
        self._rate = bytes_per_s
        self._withheld: list[tuple[float, int, TransferKey, TransferOutcome]] = []
        self._free_at = 0.0
        worker.get_finished = self._release  # type: ignore[method-assign]

    def end(self) -> None:
        """End throttling: everything is reported with the next call."""
        self._rate = float("inf")
        self._free_at = 0.0
        self._withheld = [(0.0, *rest) for _, *rest in self._withheld]  # type: ignore[misc]

    def _release(self) -> TransferResults:
        now = MONOTONIC.now()
        for index, outcomes in enumerate(self._get_finished()):
            for key, outcome in outcomes.items():
                self._free_at = max(self._free_at, now) + outcome.num_bytes / self._rate
                self._withheld.append((self._free_at, index, key, outcome))
        due = [entry for entry in self._withheld if entry[0] <= now]
        if not due:
            return NO_TRANSFERS
        self._withheld = [entry for entry in self._withheld if entry[0] > now]
        maps: tuple[dict[TransferKey, TransferOutcome], ...] = ({}, {}, {}, {})
        for _, index, key, outcome in due:
            maps[index][key] = outcome
        return TransferResults(*maps)
