"""A report that a router asks for: of now, of all ranks, and nothing is run for it."""

import pytest

from pdkv.engine.core import EngineCore
from pdkv.engine.step_loop import Ahead, InTurn, StepLoop
from pdkv.engine.worker.executor import NOTHING_ENDED, Ended
from pdkv.engine.worker.step_queue import StepQueue
from pdkv.testing.engine import make_core, of_type, submit
from pdkv.testing.standin import StandInExecutor
from pdkv.wire.messages import AskReport
from pdkv.wire.reports import ConnectorStats, LoadReport


class Engine:
    """A core and its loop; the ranks' counters move although no transfer ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
        self.core: EngineCore = make_core(options={})
        self.saves = 0
        self.orders = StepQueue(self.core.executor, lambda: None)
        self.steps: StepLoop = Ahead(self.core, self.orders, 2) if ahead else InTurn(self.core)
        monkeypatch.setattr(StandInExecutor, "ask_finished", self.ask_finished)
        for name in ("r", "s"):
            self.core.router_joined(name, "e")
        self.said(0.0)
        self.run()  # the step that it begins with
        self.said(0.0)

    def ask_finished(self, executor: object = None, *, with_stats: bool = False) -> Ended:
        stats = {"": ConnectorStats(saves=self.saves)}
        return Ended(NOTHING_ENDED.transfers, stats) if with_stats else NOTHING_ENDED

    def said(self, now: float) -> dict[str, list[LoadReport]]:
        """The reports that answer something, by router."""
        self.steps.turn()
        sent = self.core.take_messages(now)
        return {name: [m for m in of_type(messages, LoadReport) if m.answers] for name, messages in sent}

    def run(self) -> None:
        while self.orders.num_orders:
            self.orders.run_next()


def saves(report: LoadReport) -> int:
    return sum(stats.saves for stats in report.connectors.values())


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "ahead"])
def test_the_router_that_asks_is_told_what_the_ranks_say_now(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    engine = Engine(monkeypatch, ahead)
    engine.saves, steps = 3, engine.core.counters.steps
    engine.core.handle("r", AskReport(7), 0.0)
    told = engine.said(0.0)
    engine.run()
    told = told if not ahead else engine.said(0.0)
    (report,) = told["r"]
    assert (report.answers, saves(report)) == (7, 3)
    assert not told.get("s")
    assert engine.core.counters.steps == steps, "a question is no step"
    assert not engine.core.has_work


def test_those_who_ask_while_an_answer_is_under_way_get_the_next_one_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, ahead=True)
    engine.core.handle("r", AskReport(1), 0.0)
    assert not any(engine.said(0.0).values())
    engine.core.handle("r", AskReport(2), 0.0)
    engine.core.handle("s", AskReport(1), 0.0)
    engine.core.handle("r", AskReport(3), 0.0)
    assert engine.orders.num_orders == 1
    engine.run()
    engine.saves = 5
    assert [report.answers for report in engine.said(0.0)["r"]] == [1]
    engine.run()
    told = engine.said(0.0)
    assert {name: [(m.answers, saves(m)) for m in reports] for name, reports in told.items()} == {
        "r": [(3, 5)], "s": [(1, 5)]
    }  # fmt: skip


def test_the_answer_comes_behind_a_step_that_runs_and_a_router_that_left_gets_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(monkeypatch, ahead=True)
    engine.core.handle("s", submit(list(range(10)), max_tokens=1), 0.0)
    engine.said(0.0)
    engine.core.handle("r", AskReport(1), 0.0)
    engine.core.handle("s", AskReport(2), 0.0)
    engine.said(0.0)
    engine.core.router_left("r")
    engine.core.router_joined("r", "e2")
    engine.run()
    told = engine.said(0.0)
    assert not told.get("r")
    (report,) = told["s"]
    assert (report.answers, report.steps) == (2, engine.core.counters.steps)
    assert report.steps >= 1
