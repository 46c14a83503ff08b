"""The worker side that transports share: jobs, batches, lanes, deadlines, cancels; the transport is made of gates."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from no_threads import no_threads

from pdkv.base.clock import MONOTONIC, Clock
from pdkv.connectors.base import Direction, KVConnectorMetadata, TransferKey, TransferOutcome
from pdkv.connectors.transfer.lanes import SHARED_LANE, LaneConfig
from pdkv.connectors.transfer.worker import Job, Task, TransferWorker
from pdkv.errors import ConfigError, PeerGone, TransferError
from pdkv.testing import VirtualClock

WAIT_S = 60.0
KEY: TransferKey = TransferKey("t", 1)


class Gate:
    """What a job does: it says that it runs, waits until it may end, and ends as it is told."""

    def __init__(self, num_bytes: int | None = 1, error: Exception | None = None, *, is_open: bool = True) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.num_bytes = num_bytes
        self.error = error
        if is_open:
            self.opened.set()


class GateWorker(TransferWorker):
    def __init__(self, *, timeout_s: float = WAIT_S, clock: Clock = MONOTONIC, **lanes: Any) -> None:
        self.woken = threading.Semaphore(0)
        self.interrupted: list[Any] = []
        self.lets_go = True
        self.closed: list[Any] = []
        super().__init__(self.woken.release, timeout_s=timeout_s, lanes=LaneConfig(**lanes), clock=clock)
        self.start_threads()

    def start_load_kv(self, meta: KVConnectorMetadata) -> None:
        raise NotImplementedError

    def run_job(self, job: Job, scratch: Any) -> int | None:
        gate: Gate = job.order
        gate.reached.set()
        assert gate.opened.wait(WAIT_S)
        job.check()
        if gate.error is not None:
            raise gate.error
        return gate.num_bytes

    def interrupt(self, job: Job) -> bool:
        self.interrupted.append(job.order)
        return self.lets_go

    def close_scratch(self, lane: Any, scratch: Any) -> None:
        self.closed.append(lane)

    def next_results(self) -> dict[str, dict[TransferKey, TransferOutcome]]:
        """The next non-empty results, by name."""
        while not (results := self.get_finished()):
            assert self.woken.acquire(timeout=WAIT_S), "no result"
        return {name: dict(found) for name, found in results._asdict().items() if found}


@pytest.fixture
def make_worker() -> Iterator[Callable[..., GateWorker]]:
    made: list[GateWorker] = []

    def make(**arguments: Any) -> GateWorker:
        made.append(GateWorker(**arguments))
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown()
        assert not worker.lanes.threads


def test_a_transfer_ends_when_all_its_jobs_have(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker(num_shared=2)
    held = Gate(5, is_open=False)
    worker.submit(KEY, "receive", [Task(Gate(3)), Task(held)])
    assert held.reached.wait(WAIT_S)
    assert not worker.get_finished()
    held.opened.set()
    results = worker.next_results()
    assert list(results) == ["finished_receiving"]
    assert results["finished_receiving"][KEY].num_bytes == 8


def test_batches_are_reported_by_name_and_the_transfer_with_the_last(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker()
    worker.submit(KEY, "send", [Task(Gate(1))], batch=TransferKey("t", 1, part=1), last=False)
    results = worker.next_results()
    assert list(results) == ["finished_sending"]
    assert results["finished_sending"][TransferKey("t", 1, part=1)][:2] == ("", 1)
    worker.submit(KEY, "send", [], batch=TransferKey("t", 1, part=2), last=False)  # nothing to do on this rank
    assert set(worker.next_results()["finished_sending"]) == {TransferKey("t", 1, part=2)}
    worker.submit(KEY, "send", [Task(Gate(2))], batch=TransferKey("t", 1, part=3))
    found: set[TransferKey] = set()
    while KEY not in found:
        found |= set(worker.next_results()["finished_sending"])
    assert found == {TransferKey("t", 1, part=3), KEY}


def test_after_a_failure_what_waits_ends_at_once_and_later_batches_fail(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker()
    never = Gate()
    failing = Gate(error=PeerGone("gone"), is_open=False)
    worker.submit(KEY, "send", [Task(failing), Task(never)], batch=TransferKey("t", 1, part=1), last=False)
    failing.opened.set()
    results: dict[TransferKey, TransferOutcome] = {}
    while KEY not in results:
        results |= worker.next_results()["failed_sending"]
    assert {outcome.code for outcome in results.values()} == {"peer_gone"}
    assert set(results) == {KEY, TransferKey("t", 1, part=1)}
    assert not never.reached.is_set()
    worker.submit(KEY, "send", [Task(never)], batch=TransferKey("t", 1, part=2))
    assert list(worker.next_results()["failed_sending"]) == [TransferKey("t", 1, part=2)]
    assert not never.reached.is_set()
    assert worker.num_open_jobs == 0


def test_a_cancel_answers_queued_jobs_at_once_and_running_ones_when_they_stop(
    make_worker: Callable[..., GateWorker],
) -> None:
    worker = make_worker()
    running, queued = Gate(is_open=False), Gate()
    worker.submit(KEY, "receive", [Task(running)])
    worker.submit(TransferKey("u", 1), "receive", [Task(queued)])
    assert running.reached.wait(WAIT_S)
    worker.cancel(TransferKey("u", 1), "receive")
    assert worker.next_results()["failed_receiving"][TransferKey("u", 1)].code == "transfer_cancelled"
    worker.cancel(KEY, "receive")
    assert not worker.get_finished()
    assert worker.interrupted == [running]
    running.opened.set()
    assert worker.next_results()["failed_receiving"][KEY].code == "transfer_cancelled"
    assert not queued.reached.is_set()


@pytest.mark.parametrize(
    ("direction", "ends"),
    [("send", {"failed_sending", "finished_receiving"}), ("receive", {"finished_sending", "failed_receiving"})],
)
def test_a_cancel_leaves_the_other_direction_alone(
    make_worker: Callable[..., GateWorker], direction: Direction, ends: set[str]
) -> None:
    """What an engine borrows for a prompt and what it hands over of it have one key."""
    worker = make_worker()
    sides: tuple[Direction, ...] = ("send", "receive")
    jobs = [job for side in sides for job in worker.submit(KEY, side, [Task(None, posted=True)])]
    worker.cancel(KEY, direction)
    for job in jobs:
        worker.end_job(job)
    assert set(worker.next_results()) == ends


def test_unknown_keys_are_counted_and_ignored(make_worker: Callable[..., GateWorker]) -> None:
    """F2: a cancel or a duplicate order for what is not there changes nothing."""
    worker = make_worker()
    worker.cancel(KEY, "receive")
    held = Gate(is_open=False)
    worker.submit(KEY, "receive", [Task(held)])
    assert worker.submit(KEY, "receive", [Task(Gate())]) == []
    held.opened.set()
    worker.next_results()
    worker.cancel(KEY, "receive")
    assert worker.num_unknown_keys == 3
    worker.submit(KEY, "receive", [Task(Gate())])  # again, after a preemption
    assert worker.next_results()["finished_receiving"][KEY].num_bytes == 1


def test_a_new_batch_of_a_complete_transfer_fails_and_a_repeated_one_is_counted(
    make_worker: Callable[..., GateWorker],
) -> None:
    """The engine holds a batch's blocks until its name is reported; the one that is under way keeps its own."""
    worker = make_worker()
    held = Gate(is_open=False)
    worker.submit(KEY, "send", [Task(held)], batch=TransferKey("t", 1, part=1))
    for _ in range(2):
        assert worker.submit(KEY, "send", [Task(Gate())], batch=TransferKey("t", 1, part=2)) == []
        assert worker.submit(KEY, "send", [Task(Gate())], batch=TransferKey("t", 1, part=1)) == []
    assert worker.next_results().keys() == {"failed_sending"}
    assert not worker.get_finished()
    assert worker.num_unknown_keys == 4
    held.opened.set()
    assert set(worker.next_results()["finished_sending"]) == {TransferKey("t", 1, part=1), KEY}


class ScratchWorker(GateWorker):
    """Whose threads cannot have what they need, `num_failures` times."""

    num_failures = 0

    def make_scratch(self, lane: Any) -> Any:
        if self.num_failures:
            self.num_failures -= 1
            raise TransferError("no buffers") if self.num_failures % 2 else MemoryError("no memory")
        return None


def test_a_lane_without_scratch_fails_what_it_is_given_and_recovers() -> None:
    worker = ScratchWorker(num_shared=0)
    worker.num_failures = 3  # as the thread starts and for the first job, then for the second one
    for _ in range(2):
        worker.submit(KEY, "receive", [Task(Gate(), lane="own")])
        assert worker.next_results()["failed_receiving"][KEY].code == "transfer_failed"
    worker.submit(KEY, "receive", [Task(Gate(), lane="own")])
    assert worker.next_results()["finished_receiving"][KEY].num_bytes == 1
    worker.shutdown()
    assert not worker.lanes.threads
    assert worker.closed == ["own"]


def test_a_thread_that_cannot_start_is_tried_again(make_worker: Callable[..., GateWorker]) -> None:
    """The step thread goes on; what waits is served when there is room for a thread again."""
    worker = make_worker(num_shared=0)
    with no_threads():
        worker.submit(KEY, "receive", [Task(Gate(), lane="a")])
    assert not worker.get_finished()
    assert not worker.lanes.threads
    worker.submit(TransferKey("u", 1), "receive", [Task(Gate(), lane="b")])
    found: set[TransferKey] = set()
    while len(found) < 2:
        found |= set(worker.next_results()["finished_receiving"])


def test_without_a_shared_thread_a_worker_does_not_start() -> None:
    with no_threads(), pytest.raises(ConfigError, match="no thread for pdkv-io"):
        GateWorker()


def test_a_posted_job_ends_by_its_transport(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker()
    (posted,) = worker.submit(KEY, "receive", [Task(None, posted=True)])
    assert worker.enter(posted)
    worker.leave(posted)
    assert not worker.get_finished()
    worker.end_job(posted, num_bytes=7)
    assert worker.next_results()["finished_receiving"][KEY].num_bytes == 7
    worker.end_job(posted, "peer_gone")  # too late
    assert not worker.enter(posted)
    assert not worker.get_finished()


@pytest.mark.parametrize("lets_go", [True, False])
def test_a_cancelled_posted_job_ends_when_nothing_writes_it(
    make_worker: Callable[..., GateWorker], lets_go: bool
) -> None:
    """F1: neither a thread here nor the peer, whichever of them is the last."""
    worker = make_worker()
    worker.lets_go = lets_go
    for peer_is_last in (True, False):
        (posted,) = worker.submit(KEY, "receive", [Task(None, posted=True)])
        assert worker.enter(posted)
        worker.cancel(KEY, "receive")
        assert not worker.enter(posted)
        ends = [worker.leave] if lets_go else [worker.leave, worker.let_go]
        for end in ends if peer_is_last else reversed(ends):
            assert not worker.get_finished()  # somebody writes it
            end(posted)
        assert worker.next_results()["failed_receiving"][KEY].code == "transfer_cancelled"
    (posted,) = worker.submit(KEY, "receive", [Task(None, posted=True)])
    worker.cancel(KEY, "receive")
    assert bool(worker.get_finished()) == lets_go


def test_a_job_that_becomes_posted_is_ended_by_its_transport(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker()
    gate = Gate(num_bytes=None, is_open=False)
    (job,) = worker.submit(KEY, "send", [Task(gate)])
    gate.opened.set()
    while job.state != "posted":
        threading.Event().wait(0.001)
    worker.end_job(job, num_bytes=4)
    assert worker.next_results()["finished_sending"][KEY].num_bytes == 4


def test_deadlines_end_queued_and_posted_jobs_and_stop_running_ones(make_worker: Callable[..., GateWorker]) -> None:
    clock = VirtualClock()
    worker = make_worker(timeout_s=5.0, clock=clock)
    running = Gate(is_open=False)
    (job,) = worker.submit(KEY, "receive", [Task(running, timeout_s=8.0)])
    assert running.reached.wait(WAIT_S)
    worker.submit(TransferKey("queued", 1), "receive", [Task(Gate())])
    worker.submit(TransferKey("posted", 1), "receive", [Task(None, posted=True)])
    clock.advance(4.9)
    assert not worker.get_finished()
    clock.advance(0.1)
    found = worker.next_results()["failed_receiving"]
    assert {key: outcome.code for key, outcome in found.items()} == dict.fromkeys(
        [TransferKey("queued", 1), TransferKey("posted", 1)], "transfer_timeout"
    )
    assert not job.stop_code
    clock.advance(3.0)
    assert not worker.get_finished()  # it has to stop, and has not yet
    running.opened.set()
    assert worker.next_results()["failed_receiving"][KEY].code == "transfer_timeout"


def test_an_unexpected_error_fails_the_job_and_not_the_thread(
    make_worker: Callable[..., GateWorker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker()
    worker.submit(KEY, "receive", [Task(Gate(error=ZeroDivisionError()))])
    assert worker.next_results()["failed_receiving"][KEY].code == "transfer_failed"
    assert worker.num_unexpected_errors == 1
    assert "ZeroDivisionError" in caplog.text
    for number in range(20):  # the same again: its traceback has been seen
        key = ("again", number)
        worker.submit(key, "receive", [Task(Gate(error=ZeroDivisionError()))])
        assert key in worker.next_results()["failed_receiving"]
    assert worker.num_unexpected_errors == 21
    assert caplog.text.count("Traceback") == 1
    worker.submit(KEY, "receive", [Task(Gate())])
    assert KEY in worker.next_results()["finished_receiving"]


def test_a_stuck_lane_does_not_hold_up_another(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker()
    stuck = Gate(is_open=False)
    worker.submit(TransferKey("stuck", 1), "send", [Task(stuck, lane="a")])
    worker.submit(TransferKey("free", 1), "send", [Task(Gate(), lane="b")])
    assert list(worker.next_results()["finished_sending"]) == [TransferKey("free", 1)]
    stuck.opened.set()
    worker.next_results()


def test_lanes_are_bounded_and_idle_ones_make_room(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker(max_lanes=2)
    for i in range(20):
        worker.submit(TransferKey(f"t{i}", 1), "send", [Task(Gate(), lane=i % 5)])
    found: set[TransferKey] = set()
    while len(found) < 20:
        found |= set(worker.next_results()["finished_sending"])
        assert worker.lanes.num_lanes <= 2
    assert {0, 1, 2, 3, 4} >= set(worker.closed) >= {0}


def test_an_idle_lane_closes(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker(idle_s=0.01)
    worker.submit(KEY, "send", [Task(Gate(), lane="a")])
    worker.next_results()
    for thread in list(worker.lanes.threads):
        if thread.name != "pdkv-io-0":
            thread.join(WAIT_S)
    assert worker.closed == ["a"]
    assert worker.lanes.num_lanes == 0
    worker.submit(KEY, "send", [Task(Gate(), lane="a")])
    assert KEY in worker.next_results()["finished_sending"]


def test_shutdown_ends_everything(make_worker: Callable[..., GateWorker]) -> None:
    worker = make_worker(num_shared=1, max_lanes=1)
    gates = [Gate(is_open=False) for _ in range(3)]
    for i, lane in enumerate((SHARED_LANE, "a", "b")):
        worker.submit(TransferKey(f"t{i}", 1), "send", [Task(gates[i], lane=lane)])
    worker.submit(TransferKey("posted", 1), "receive", [Task(None, posted=True)])
    assert gates[0].reached.wait(WAIT_S)
    assert gates[1].reached.wait(WAIT_S)
    stopping = threading.Thread(target=worker.shutdown)
    stopping.start()
    for gate in gates:
        gate.opened.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    assert not worker.lanes.threads
    assert worker.num_open_jobs == 0
    assert not gates[2].reached.is_set()
