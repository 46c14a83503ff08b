"""The step thread and a device that computes behind it: what is launched when, and in which order results come."""

import threading
from collections.abc import Sequence

import pytest

from pdkv.connectors.base import NO_TRANSFERS, TransferKey, TransferOutcome, TransferResults
from pdkv.engine.plan import ScheduledRequest, StepOutput, StepPlan
from pdkv.engine.worker.executor import Ended, Executor
from pdkv.engine.worker.pending import PendingStep
from pdkv.engine.worker.step_queue import StepQueue
from pdkv.errors import RankTimeout
from pdkv.wire.kv import EngineCard

WAIT_S = 30.0
SENT, LOADED = TransferKey("sent", 0), TransferKey("loaded", 0)


class _Step(PendingStep):
    def __init__(self, device: "Device", number: int) -> None:
        self._device, self._number = device, number
        self._found = device.found_by_launch.pop(number, NO_TRANSFERS)

    @property
    def has_sends(self) -> bool:
        return self._found.has_sends

    def take_loads(self) -> TransferResults:
        loads = self._found._replace(finished_sending={})
        self._found = self._found._replace(finished_receiving={})
        return loads

    @property
    def is_done(self) -> bool:
        self._device.looks += 1
        if self._number in self._device.overdue:
            raise RankTimeout(f"step {self._number} is late")
        return self._device.has_computed(self._number)

    def finish(self) -> StepOutput:
        self._device.log.append(f"finish {self._number}")
        if self._number in self._device.fails_at_finish:
            raise RankTimeout(f"step {self._number} did not end")
        return StepOutput(self._number, {}, {}, self._found)


class Device(Executor):
    """Launches, and writes down what happens; steps have been computed when the test says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.computed: set[int] = set()
        self.overdue: set[int] = set()
        self.fails_at_finish: set[int] = set()
        self.fails_at_launch: set[int] = set()
        self.ended = NO_TRANSFERS
        self.found_by_launch: dict[int, TransferResults] = {}
        self.looks = 0
        self.computes_after = 0  # looks

    def has_computed(self, number: int) -> bool:
        return number in self.computed or (bool(self.computes_after) and self.looks >= self.computes_after)

    def execute(self, plan: StepPlan) -> StepOutput:
        raise AssertionError("a queue launches")

    def launch(self, plan: StepPlan) -> PendingStep:
        self.log.append(f"launch {plan.step_id}")
        if plan.step_id in self.fails_at_launch:
            raise MemoryError(f"step {plan.step_id}")
        return _Step(self, plan.step_id)

    def ask_finished(self, *, with_stats: bool = False) -> Ended:
        self.log.append("ask")
        return Ended(self.ended, {})

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        self.log.append("peers")

    def shutdown(self) -> None:
        pass


def plan(number: int) -> StepPlan:
    return StepPlan(number, [], [ScheduledRequest(("r", 0), 0, 1, [], samples=True)], [])


def kinds(orders: StepQueue) -> list[int | str]:
    return [r.step_id if isinstance(r, StepOutput) else type(r).__name__ for r in orders.collect()]


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def orders(device: Device) -> StepQueue:
    return StepQueue(device, lambda: None)


def test_a_step_that_is_ordered_is_launched_before_the_one_before_it_is_finished(
    device: Device, orders: StepQueue
) -> None:
    for number in range(5):
        orders.submit(plan(number))
    for _ in range(5):
        assert orders.run_next()
    assert device.log == [f"launch {i}" for i in range(3)] + ["finish 0", "launch 3", "finish 1", "launch 4"]
    assert kinds(orders) == [0, 1]
    assert not orders.is_done
    device.computed |= {2, 3, 4}
    assert all(orders.run_next() for _ in range(3))
    assert kinds(orders) == [2, 3, 4]
    assert orders.is_done


def test_a_plan_that_computes_nothing_waits_for_no_step_and_is_told_behind_all_of_them(
    device: Device, orders: StepQueue
) -> None:
    for number in range(3):
        orders.submit(plan(number))
    orders.submit(StepPlan(3, [], [], []))
    for _ in range(4):
        assert orders.run_next()
    assert device.log == [f"launch {i}" for i in range(4)]
    device.computed |= {0, 1, 2, 3}
    assert all(orders.run_next() for _ in range(4))
    assert kinds(orders) == [0, 1, 2, 3]


def test_a_step_that_its_launch_has_computed_is_finished_at_once(device: Device, orders: StepQueue) -> None:
    device.computed |= {0, 1}
    orders.submit(plan(0))
    orders.submit(plan(1))
    orders.run_next()
    assert device.log == ["launch 0", "finish 0"]
    orders.run_next()
    assert kinds(orders) == [0, 1]
    assert orders.is_done


def test_an_order_that_comes_while_the_device_computes_is_not_kept_waiting_for_it(
    device: Device, orders: StepQueue
) -> None:
    orders.submit(plan(0))
    orders.run_next()
    looked = threading.Event()
    launch = device.launch

    def launch_behind(step: StepPlan) -> PendingStep:
        assert "finish 0" not in device.log
        return launch(step)

    device.launch = launch_behind  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: (orders.run_next(), looked.set()))
    thread.start()
    orders.submit(plan(1))
    assert looked.wait(WAIT_S)
    thread.join()
    assert device.log == ["launch 0", "launch 1"]


def test_the_end_of_a_step_is_found_without_another_order(device: Device, orders: StepQueue) -> None:
    orders.submit(plan(0))
    orders.run_next()
    device.computes_after = device.looks + 3
    assert orders.run_next()
    assert kinds(orders) == [0]


BOTH = TransferResults({SENT: TransferOutcome()}, {}, {LOADED: TransferOutcome()}, {})
SEND, LOAD = BOTH._replace(finished_receiving={}), BOTH._replace(finished_sending={})


def told(orders: StepQueue) -> list[int | tuple[list[TransferKey], list[TransferKey]]]:
    """Steps, and what has been sent and loaded, in order."""
    found: list[int | tuple[list[TransferKey], list[TransferKey]]] = []
    for result in orders.collect():
        assert isinstance(result, StepOutput | Ended)
        ends = list(result.transfers.finished_sending), list(result.transfers.finished_receiving)
        found += [result.step_id] if isinstance(result, StepOutput) else []
        found += [ends] if any(ends) else []
    return found


@pytest.mark.parametrize(
    ("ended", "expected"),
    [(SEND, [0, ([SENT], [])]), (LOAD, [([], [LOADED]), 0]), (BOTH, [0, ([SENT], [LOADED])])],
    ids=["send", "load", "both"],
)
def test_what_the_connector_says_between_two_steps_is_asked_at_once_and_sends_are_told_in_turn(
    device: Device, orders: StepQueue, ended: TransferResults, expected: list[object]
) -> None:
    device.ended = ended
    orders.submit(plan(0))
    orders.ask_finished()
    orders.update_peers([], [])
    orders.submit(plan(1))
    for _ in range(3):
        orders.run_next()
    device.computed.add(0)
    orders.run_next()
    assert device.log == ["launch 0", "ask", "peers", "launch 1", "finish 0"]
    assert told(orders) == expected
    device.computed.add(1)
    orders.run_next()
    assert told(orders) == [1]
    assert orders.is_done


@pytest.mark.parametrize(
    ("found", "expected"),
    [(LOAD, [([], [LOADED]), 0, 1]), (SEND, [0, ([SENT], []), 1]), (BOTH, [0, ([SENT], [LOADED]), 1])],
    ids=["load", "send", "both"],
)
def test_loads_that_a_launch_finds_ended_do_not_wait_for_its_step(
    device: Device, orders: StepQueue, found: TransferResults, expected: list[object]
) -> None:
    device.found_by_launch[0] = found
    for number in range(2):
        orders.submit(plan(number))
        orders.run_next()
    device.computed |= {0, 1}
    for _ in range(2):
        orders.run_next()
    assert told(orders) == expected


def test_a_load_waits_for_the_send_before_it(device: Device, orders: StepQueue) -> None:
    """Of a store: it is told what was stored before what it could not find."""
    orders.submit(plan(0))
    orders.run_next()
    for device.ended in (SEND, LOAD):
        orders.ask_finished()
        orders.run_next()
    assert told(orders) == []
    device.computed.add(0)
    orders.run_next()
    assert told(orders) == [0, ([SENT], []), ([], [LOADED])]


def test_a_launch_that_fails_is_told_behind_the_step_before_it(device: Device, orders: StepQueue) -> None:
    device.fails_at_launch.add(1)
    orders.submit(plan(0))
    orders.submit(plan(1))
    assert orders.run_next()
    assert not orders.run_next()
    assert device.log == ["launch 0", "launch 1", "finish 0"]
    with pytest.raises(MemoryError, match="step 1"):
        orders.collect()


@pytest.mark.parametrize("next_too", [False, True])
def test_the_first_failure_is_the_one_that_is_told(device: Device, orders: StepQueue, next_too: bool) -> None:
    device.fails_at_finish.add(0)
    device.fails_at_launch |= {1} if next_too else set()
    orders.submit(plan(0))
    orders.submit(plan(1))
    assert orders.run_next()
    device.computed.add(0)
    assert not orders.run_next()
    with pytest.raises(RankTimeout, match="step 0 did not end"):
        orders.collect()


def test_a_device_that_hangs_is_an_error(device: Device, orders: StepQueue) -> None:
    orders.submit(plan(0))
    orders.run_next()
    device.overdue.add(0)
    assert not orders.run_next()
    with pytest.raises(RankTimeout, match="late"):
        orders.collect()


def test_a_stop_waits_for_the_step_under_way(device: Device, orders: StepQueue) -> None:
    orders.submit(plan(0))
    orders.run_next()
    orders.submit(plan(1))
    orders.stop()
    assert not orders.run_next()
    assert device.log == ["launch 0", "finish 0"]
