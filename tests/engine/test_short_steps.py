"""Steps that are too short to plan beside: the loop's own thread runs them in turn, and the other one the long ones."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pdkv.config import EngineConfig
from pdkv.connectors.base import TransferKey, TransferOutcome, TransferResults
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.step_loop import StepLoop, make_step_loop
from pdkv.engine.worker.executor import NOTHING_ENDED, Ended
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import EngineToRouter, Finished, Peers

PROMPT = list(range(100, 110))
WAIT_S = 60.0
LEAST_S = 1.0


class Watched:
    """An engine with a thread for its steps; those of `least_long` tokens and more are expected to be long."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.least_long = 10
        self.log: list[tuple[str, int]] = []  # which thread ran a step, or entered: then 0; and the step's tokens
        self.gate = threading.Event()  # for long steps
        self.gate.set()
        self._news = threading.Event()
        self._execute = core.executor.execute
        core.executor.execute = self._run  # type: ignore[method-assign]
        core.executor.enter_thread = self._enter  # type: ignore[method-assign]
        core.watch.times.predict_s = lambda count: LEAST_S * (count >= self.least_long)  # type: ignore[method-assign]
        self.steps: StepLoop = make_step_loop(core, 2, self._news.set, LEAST_S)

    def _run(self, plan: StepPlan) -> StepOutput:
        self.log.append((threading.current_thread().name, plan.num_tokens))
        if plan.num_tokens >= self.least_long:
            assert self.gate.wait(WAIT_S)
        return self._execute(plan)

    def _enter(self) -> None:
        self.log.append((threading.current_thread().name, 0))

    def turn(self) -> list[EngineToRouter]:
        self.steps.turn()
        return [m for _, sent in self.core.take_messages(0.0) for m in sent]

    def run(self) -> list[EngineToRouter]:
        """Turns until nothing is left to do."""
        messages: list[EngineToRouter] = []
        while self.core.requests or not self.steps.is_idle:
            wait_s = self.steps.wait_s()
            assert self._news.wait(WAIT_S if wait_s is None else wait_s) or wait_s is not None
            self._news.clear()
            messages += self.turn()
        return messages


@contextmanager
def watched(core: EngineCore) -> Iterator[Watched]:
    engine = Watched(core)
    try:
        yield engine
    finally:
        engine.gate.set()
        engine.steps.close()


def test_short_steps_are_run_by_the_loop_one_in_each_turn() -> None:
    core = make_core()
    with watched(core) as engine:
        core.handle("r", submit(PROMPT[:4], max_tokens=3), time.monotonic())
        for count in (4, 1, 1):
            messages = engine.turn()
            assert len(output_of(messages, "a")) == 1  # before the next step
            assert engine.log.pop() == ("MainThread", count)
            assert engine.steps.is_idle
        assert of_type(messages, Finished)
        assert engine.log == []
        engine.run()
    assert at_rest(core)


def test_a_long_step_is_run_by_the_thread_and_one_short_step_is_planned_beside_it() -> None:
    core = make_core()
    with watched(core) as engine:
        engine.gate.clear()
        core.handle("r", submit(PROMPT, max_tokens=6), time.monotonic())
        engine.turn()
        assert core.watch.num_under_way == 2
        assert engine.steps.wait_s() is None
        engine.turn()
        assert core.watch.num_under_way == 2  # nothing beside the short one
        engine.gate.set()
        messages = engine.run()
    assert output_of(messages, "a") == expected_tokens(PROMPT, 6)
    # Each thread is entered before the first step that it runs behind the other's, and no more often.
    assert engine.log == [
        ("steps", 0), ("steps", 10), ("steps", 1),
        ("MainThread", 0), ("MainThread", 1), ("MainThread", 1), ("MainThread", 1), ("MainThread", 1),
    ]  # fmt: skip
    assert at_rest(core)


def test_long_steps_are_planned_two_ahead() -> None:
    core = make_core()
    with watched(core) as engine:
        engine.least_long = 1
        engine.gate.clear()
        core.handle("r", submit(PROMPT, max_tokens=6), time.monotonic())
        engine.turn()
        assert core.watch.num_under_way == 3
        engine.gate.set()
        messages = engine.run()
    assert output_of(messages, "a") == expected_tokens(PROMPT, 6)
    assert engine.log == [("steps", 0), ("steps", 10), *[("steps", 1)] * 5]
    assert at_rest(core)


def test_a_short_step_waits_for_what_was_ordered_before_it() -> None:
    core = make_core(options={"fabric": "short-steps"})
    told = threading.Event()
    with watched(core) as engine:
        log = engine.log

        def update_peers(added: object, removed: object) -> None:
            assert told.wait(WAIT_S)
            log.append(("peers", 0))

        core.executor.update_peers = update_peers  # type: ignore[method-assign]
        core.handle("r", Peers([make_core(name="x").card]), time.monotonic())
        core.handle("r", submit(PROMPT[:4], max_tokens=2), time.monotonic())
        engine.turn()
        assert log == []
        told.set()
        messages = engine.run()
    assert log == [("peers", 0), ("steps", 0), ("steps", 4), ("MainThread", 0), ("MainThread", 1)]
    assert output_of(messages, "a") == expected_tokens(PROMPT[:4], 2)


def test_what_transfers_bring_between_short_steps_is_asked_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    ended = Ended(TransferResults({TransferKey("t", 0): TransferOutcome()}, {}, {}, {}))
    answers = [ended, NOTHING_ENDED, ended]
    asked: list[str] = []
    settled: list[Ended] = []

    def ask() -> Ended:
        asked.append(threading.current_thread().name)
        return answers.pop(0)

    monkeypatch.setattr(core.executor, "ask_finished", ask)
    monkeypatch.setattr(core.executor, "take_finished", ask)
    monkeypatch.setattr(core, "settle", settled.append)
    with watched(core) as engine:
        engine.steps.wake()
        assert settled == [ended]
        core.handle("r", submit(PROMPT[:4], max_tokens=2), time.monotonic())
        engine.turn()
        assert settled == [ended]
        engine.turn()  # before it plans
        assert settled == [ended, ended]
    assert asked == ["MainThread"] * 3


def test_only_a_cpu_s_steps_may_be_too_short() -> None:
    assert EngineConfig(device="cpu", in_turn_below_s=0.25).least_step_ahead_s == 0.25
    assert EngineConfig(device="cuda", in_turn_below_s=0.25).least_step_ahead_s == 0.0
