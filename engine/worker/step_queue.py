"""The orders to an executor and their results, each in order except for ended loads, so that the model may run on a
separate thread.

Everything that touches the workers passes through here: steps, queries for ended transfers, peer changes. So they
happen between two steps and in the order in which the engine's loop gave them, whichever thread runs them.

A device runs asynchronously. So an ordered step is launched before earlier ones are finished: the device goes from one
to the next while the host handles the results of the first.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pdkv.base.service_thread import ServiceThread
from pdkv.connectors.base import NO_TRANSFERS, TransferResults
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.worker.executor import NOTHING_ENDED, Ended, Executor
from pdkv.engine.worker.pending import LOOK_S, MAX_PENDING, PendingStep
from pdkv.errors import RankError
from pdkv.wire.kv import EngineCard

JOIN_TIMEOUT_S = 60.0
"""Seconds for which a stop waits for the running step, which uses memory that is then freed. A launcher waits less
long.
"""


class PeersChanged(NamedTuple):
    """A peer change for the connector's worker sides."""

    added: Sequence[EngineCard]
    removed: Sequence[EngineCard]


class PeersRefused(NamedTuple):
    """The connector's worker sides refused a peer change."""

    peers: PeersChanged
    error: Exception


Order = StepPlan | PeersChanged | Literal["enter", "ask", "report", "stop"]
Result = StepOutput | Ended | PeersRefused


class _UnderWay(NamedTuple):
    """A launched step, with results of orders between it and the next step."""

    step: PendingStep
    behind: list[Result | None]
    computes: bool  # otherwise it consists of the connector's calls, which are done


class StepQueue:
    """`run_next` belongs to one thread, everything else to the engine's loop, including `run_here`.

    Args:
        notify: called by `run_next` when `collect` has something.
    """

    def __init__(self, executor: Executor, notify: Callable[[], None]) -> None:
        self._executor = executor
        self._notify = notify
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        self._is_asked = False
        self._num_ordered = 0
        self._num_done = 0  # written by `run_next`
        self._has_thread = False
        self._is_entered = False  # the executor knows that thread as its own
        self._under_way: deque[_UnderWay] = deque()  # launched by `run_next`, not finished; in order

    @property
    def is_done(self) -> bool:
        """Whether all orders have been run: until the next order, the caller may use the executor."""
        return self._num_done == self._num_ordered

    @property
    def num_orders(self) -> int:
        """Number of orders that have not begun."""
        return self._orders.qsize()

    def enter_thread(self) -> None:
        """Note that `run_next` is called on a separate thread from now on."""
        self._has_thread = True

    def submit(self, plan: StepPlan) -> None:
        """Run this step after the earlier orders."""
        if self._has_thread and not self._is_entered:
            self._is_entered = True
            self._put("enter")
        self._put(plan)

    def run_here(self, plan: StepPlan) -> StepOutput:
        """Run this step now, on the calling thread. Only while `is_done`. Raises what the executor raises."""
        assert self.is_done
        if self._is_entered:
            self._is_entered = False
            self._executor.enter_thread()
        return self._executor.execute(plan)

    def _put(self, order: Order) -> None:
        self._num_ordered += 1
        self._orders.put(order)

    def ask_finished(self) -> None:
        """Query ended transfers between two steps. `collect` returns them, if there are any."""
        if not self._is_asked:  # otherwise the query has not begun
            self._is_asked = True
            self._put("ask")

    def ask_report(self) -> None:
        """Query `Executor.report` between two steps, after the earlier orders; `collect` returns the answer."""
        self._put("report")

    def update_peers(self, added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        """Between two steps: tell the connector's worker sides about peer changes."""
        self._put(PeersChanged(added, removed))

    def stop(self) -> None:
        """Run nothing more after the current order."""
        while not self._orders.empty():
            try:
                self._orders.get_nowait()
            except queue.Empty:
                break
        self._orders.put("stop")

    def collect(self) -> list[Result]:
        """Results of orders since the last call. Never blocks; raises what a step, or a rank, raised."""
        results: list[Result] = []
        while True:
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                return results
            if isinstance(result, BaseException):
                raise result
            results.append(result)

    def run_next(self) -> bool:
        """Run the next order, or finish the step in progress if that ends first; waits for either.

        Returns False if there will be no more orders: `stop`, or an error.
        """
        try:
            order = self._next()
            if order is None:
                self._finish_first()
            elif order == "stop":
                self._finish_all()
            else:
                self._run(order)
        except BaseException as error:  # the loop must raise it
            self._results.put(error)
            self._notify()
            return False
        return order != "stop"

    def _next(self) -> Order | None:
        """The next order; None: the first step in progress ended before there was one."""
        while self._under_way:
            try:
                return self._orders.get(timeout=LOOK_S)
            except queue.Empty:
                if self._under_way[0].step.is_done:
                    return None
        return self._orders.get()

    def _run(self, order: Order) -> None:
        if isinstance(order, StepPlan):
            self._launch(order)
            return
        result = self._run_between(order)
        if self._under_way:
            if isinstance(result, Ended) and not (result.transfers.has_sends or self._has_sends):
                self._tell_loads(result.transfers)
                result = result._replace(transfers=NO_TRANSFERS)
                if result == NOTHING_ENDED:
                    result = None
            self._under_way[-1].behind.append(result)
        else:
            self._deliver(result)

    def _tell_loads(self, loads: TransferResults) -> None:
        """Deliver ended loads, which belong to no step in progress: their requests join the next planned step. Those
        after the end of a send wait with it, since a store may have stored what it then could not load.
        """
        if loads:
            self._results.put(Ended(loads))
            self._notify()

    @property
    def _has_sends(self) -> bool:
        """Whether the end of a send waits for its turn: its step's output says that there is something to send."""
        behind = (result for each in self._under_way for result in each.behind)
        told_later = any(isinstance(result, Ended) and result.transfers.has_sends for result in behind)
        return told_later or any(each.step.has_sends for each in self._under_way)

    def _launch(self, plan: StepPlan) -> None:
        """Launch a step behind at most MAX_PENDING others, or one that computes nothing behind any number, and finish
        those that have ended. Results of earlier steps are always delivered first.
        """
        while plan.scheduled and sum(each.computes for each in self._under_way) > MAX_PENDING:
            self._finish_first()
        try:
            step = self._executor.launch(plan)
        except BaseException:
            self._finish_all()
            raise
        self._under_way.append(_UnderWay(step, [], bool(plan.scheduled)))
        if not self._has_sends:
            self._tell_loads(step.take_loads())
        while self._under_way and self._under_way[0].step.is_done:
            self._finish_first()

    def _finish_all(self) -> None:
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        """Wait for the first step in progress; deliver its results and those of the orders after it."""
        step, behind, _ = self._under_way.popleft()
        self._deliver(step.finish())
        for result in behind:
            self._deliver(result)

    def _deliver(self, result: Result | None) -> None:
        """Note that an order is done."""
        if result is not None:
            self._results.put(result)
        self._num_done += 1  # afterwards: once everything is done, `collect` has all of it
        if result is not None:
            self._notify()

    def _run_between(self, order: PeersChanged | Literal["enter", "ask", "report", "stop"]) -> Result | None:
        """Run an order that is not a step."""
        if isinstance(order, PeersChanged):
            try:
                self._executor.update_peers(*order)
            except RankError:
                raise
            except Exception as error:
                return PeersRefused(order, error)
            return None
        if order == "enter":
            self._executor.enter_thread()
            return None
        if order == "report":
            return self._executor.report()
        self._is_asked = False  # before it looks: transfers that end from now on are queried again
        ended = self._executor.ask_finished()
        return ended if ended.transfers else None


class StepThread:
    """Runs the orders of a queue until closed."""

    def __init__(self, orders: StepQueue) -> None:
        self._orders = orders
        orders.enter_thread()
        self._thread = ServiceThread(self._run, orders.stop, "steps")
        self._thread.start()

    def close(self) -> None:
        """End the thread after the current order; one that hangs is abandoned. Idempotent."""
        self._thread.stop(JOIN_TIMEOUT_S)

    def _run(self, stopping: threading.Event) -> None:
        while self._orders.run_next():
            pass
