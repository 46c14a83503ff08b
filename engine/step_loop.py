"""Drives an engine's steps: one after the other on the loop's own thread, or planned ahead for the model's own thread.

The loop waits for messages and for the end of a step in one wait, calls `turn`, and sends the core's messages.
docs/engine-loop.md has the whole picture.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepOutput
from pdkv.engine.worker.executor import Ended
from pdkv.engine.worker.step_queue import StepQueue, StepThread


class StepLoop(ABC):
    """Drives one core. Used by one thread, which never calls the core's executor itself."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._clock = core.watch.clock

    @abstractmethod
    def wake(self) -> None:
        """Note that the connector has news. Raises what the executor raises: the engine is then lost."""

    @abstractmethod
    def turn(self) -> None:
        """Do what can be done now. Raises what the executor raises: the engine is then lost."""

    def wait_s(self) -> float | None:
        """Seconds until `turn` has something to do without news; None: only news causes work."""
        if self._core.has_work:
            return 0.0
        deadline = self._core.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock.now())

    @property
    def is_idle(self) -> bool:
        """Whether no step is in progress."""
        return True

    def close(self) -> None:
        """Begin no more steps. Idempotent."""

    def _is_step_due(self, now: float) -> bool:
        if self._core.has_work:
            return True
        deadline = self._core.next_deadline()
        return deadline is not None and deadline <= now


class InTurn(StepLoop):
    """Plans, runs and updates steps one after the other."""

    def wake(self) -> None:
        self._core.wake()

    def turn(self) -> None:
        if self._core.reports.begin():
            self._core.settle(self._core.executor.report())
        now = self._clock.now()
        if self._is_step_due(now):
            self._core.finish_step(self._core.begin_step(now), self._clock.now())


class Ahead(StepLoop):
    """Plans steps while an earlier one runs elsewhere: at most `max_steps_ahead` beyond the oldest that has not ended.

    Args:
        orders: the caller provides the thread that runs them, see `StepThread`.
        least_s: during a step that is expected to take less than this, nothing is planned ahead; that step is run here,
            in turn, once nothing else is in progress. 0: no step is that short.
    """

    def __init__(self, core: EngineCore, orders: StepQueue, max_steps_ahead: int, least_s: float = 0.0) -> None:
        assert max_steps_ahead > 0
        super().__init__(core)
        self._orders = orders
        self._max_steps_ahead = max_steps_ahead
        self._least_s = least_s
        self._most = max_steps_ahead + 1  # in progress at once, as the last plan left it
        self._goes_on = False  # the last plan had requests
        core.peers.workers = orders

    @property
    def is_idle(self) -> bool:
        return not self._core.watch.num_under_way

    @property
    def is_full(self) -> bool:
        """Whether a step in progress must end before another one is planned that computes something."""
        watch = self._core.watch
        return watch.num_computing >= self._most or watch.num_under_way > self._most

    def wake(self) -> None:
        if self._take_over():
            self._core.wake()
            return
        self._orders.ask_finished()
        self._core.scheduler.ask_again()

    def turn(self) -> None:
        self.take_in(self._clock.now())
        if self._core.reports.begin():
            self._orders.ask_report()
        while not self.is_full and self._is_step_due(now := self._clock.now()):
            if self.plan(now):
                return  # its results leave before the next one begins
        if self.is_full and self._core.has_work:
            self.begin_loads(self._clock.now())

    def begin_loads(self, now: float) -> None:
        """Begin loads, once, behind all steps that may be in progress: loads write blocks that no step names."""
        if self._core.watch.num_under_way == self._most and (plan := self._core.plan_loads(now)) is not None:
            self._orders.submit(plan)

    def wait_s(self) -> float | None:
        return None if self.is_full else super().wait_s()

    def _is_step_due(self, now: float) -> bool:
        return (self._goes_on and self._core.scheduler.can_go_on) or super()._is_step_due(now)

    def _take_over(self) -> bool:
        """Whether the executor may be used here: steps may be short, and all orders are done and taken in."""
        if not self._least_s or not self._orders.is_done:
            return False
        self.take_in(self._clock.now())
        return self.is_idle

    def take_in(self, now: float) -> None:
        """Update the core with the steps that have ended. Raises what the executor raised."""
        for result in self._orders.collect():
            if isinstance(result, StepOutput):
                self._core.finish_step(result, now)
            elif isinstance(result, Ended):
                self._core.settle(result)
            else:
                self._core.peers.refused(*result.peers, result.error)

    def plan(self, now: float) -> bool:
        """Plan one step. Returns whether it was short and has been run here."""
        runs_here = self._take_over()
        if runs_here:
            self._core.settle_finished()
        plan = self._core.plan_step(now)
        self._goes_on = bool(plan.scheduled)
        is_short = self._core.watch.times.predict_s(plan.num_tokens) < self._least_s
        self._most = 1 if is_short else self._max_steps_ahead + 1
        if runs_here and is_short:
            self._core.finish_step(self._orders.run_here(plan), self._clock.now())
            return True
        self._orders.submit(plan)
        return False


class _AheadOnThread(Ahead):
    """An `Ahead` with the thread that runs the steps."""

    def __init__(self, core: EngineCore, max_steps_ahead: int, notify: Callable[[], None], least_s: float) -> None:
        orders = StepQueue(core.executor, notify)
        super().__init__(core, orders, max_steps_ahead, least_s)
        self._thread = StepThread(orders)

    def close(self) -> None:
        self._thread.close()
        self._core.peers.workers = self._core.executor


def make_step_loop(
    core: EngineCore, max_steps_ahead: int, notify: Callable[[], None], least_s: float = 0.0
) -> StepLoop:
    """The loop for `--max-steps-ahead`; 0: strictly in turn.

    Args:
        notify: thread-safe; called when a step, or a question between steps, has ended.
        least_s: later steps are planned ahead only during a step that is expected to take at least this long.
    """
    return _AheadOnThread(core, max_steps_ahead, notify, least_s) if max_steps_ahead else InTurn(core)
