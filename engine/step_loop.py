"""What turns an engine's wheel: steps in turn on the loop's own thread, or planned ahead for one of the model's own.

The loop waits for messages and for the end of a step in one wait, calls `turn`, and sends what the core has to say.
docs/engine-loop.md has the whole picture.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from pdkv.engine.core import EngineCore
from pdkv.engine.executor import Ended
from pdkv.engine.plan import StepOutput
from pdkv.engine.step_queue import StepQueue, StepThread


class StepLoop(ABC):
    """Drives one core. Used by one thread, which never calls the core's executor by itself."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    @abstractmethod
    def wake(self) -> None:
        """The connector has news. Raises what the executor raises: the engine is then lost."""

    @abstractmethod
    def turn(self) -> None:
        """Do what can be done now. Raises what the executor raises: the engine is then lost."""

    def wait_s(self) -> float | None:
        """Seconds until `turn` has something to do without news; None: only news bring it."""
        if self._core.has_work:
            return 0.0
        deadline = self._core.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way."""
        return True

    def close(self) -> None:
        """No step begins any more. Idempotent."""

    def _is_step_due(self, now: float) -> bool:
        if self._core.has_work:
            return True
        deadline = self._core.next_deadline()
        return deadline is not None and deadline <= now


class InTurn(StepLoop):
    """Plan, run, update, one after the other."""

    def wake(self) -> None:
        self._core.wake()

    def turn(self) -> None:
        now = time.monotonic()
        if self._is_step_due(now):
            self._core.finish_step(self._core.begin_step(now), time.monotonic())


class Ahead(StepLoop):
    """Plans steps while an earlier one runs elsewhere: at most `max_steps_ahead` beyond the oldest that has not ended.

    Args:
        orders: who runs them is the caller's, see `run_ahead`.
    """

    def __init__(self, core: EngineCore, orders: StepQueue, max_steps_ahead: int) -> None:
        assert max_steps_ahead > 0
        super().__init__(core)
        self._orders = orders
        self._most = max_steps_ahead + 1
        self._goes_on = False  # the last plan had somebody in it
        core.workers = orders

    @property
    def is_idle(self) -> bool:
        return not self._core.watch.num_under_way

    @property
    def is_full(self) -> bool:
        """Whether a step must end before another one is planned."""
        return self._core.watch.num_under_way >= self._most

    def wake(self) -> None:
        self._orders.ask_finished()
        self._core.scheduler.ask_again()

    def turn(self) -> None:
        self.take_in(time.monotonic())
        while not self.is_full and self._is_step_due(now := time.monotonic()):
            self.plan(now)

    def wait_s(self) -> float | None:
        return None if self.is_full else super().wait_s()

    def _is_step_due(self, now: float) -> bool:
        return (self._goes_on and self._core.scheduler.can_go_on) or super()._is_step_due(now)

    def take_in(self, now: float) -> None:
        """Update the core by what has ended. Raises what the executor raised."""
        for result in self._orders.collect():
            if isinstance(result, StepOutput):
                self._core.finish_step(result, now)
            elif isinstance(result, Ended):
                self._core.settle(result)
            else:
                self._core.peers_refused(*result.peers, result.error)

    def plan(self, now: float) -> None:
        """Plan one step."""
        plan = self._core.plan_step(now)
        self._goes_on = bool(plan.scheduled)
        self._orders.submit(plan)


class _AheadOnThread(Ahead):
    """With the thread that runs the steps."""

    def __init__(self, core: EngineCore, max_steps_ahead: int, notify: Callable[[], None]) -> None:
        orders = StepQueue(core.executor, notify)
        super().__init__(core, orders, max_steps_ahead)
        self._thread = StepThread(orders)

    def close(self) -> None:
        self._thread.close()
        self._core.workers = self._core.executor


def make_step_loop(core: EngineCore, max_steps_ahead: int, notify: Callable[[], None]) -> StepLoop:
    """The loop for `--max-steps-ahead`; 0: strictly in turn.

    Args:
        notify: thread-safe; called when a step, or a question between steps, has ended.
    """
    return _AheadOnThread(core, max_steps_ahead, notify) if max_steps_ahead else InTurn(core)
