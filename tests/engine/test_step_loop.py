"""Steps planned ahead: what is in flight, what is wasted, what the loop waits for, and how it ends."""

import threading
import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from pdkv.connectors.base import TransferKey, TransferOutcome, TransferResults
from pdkv.connectors.memory.fabric import MemoryFabric
from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.step_loop import Ahead, InTurn, make_step_loop
from pdkv.engine.worker.executor import Ended
from pdkv.engine.worker.step_queue import StepQueue
from pdkv.errors import PeerGone, RankGone
from pdkv.sampling.params import SamplingParams
from pdkv.testing.engine import EOS, at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import StandInExecutor, expected_tokens
from pdkv.wire.kv import EngineCard
from pdkv.wire.messages import Abort, EngineToRouter, Finished, HandedOff, Peers, Tokens, Trial

PROMPT = list(range(100, 110))
WAIT_S = 60.0


class Stepped:
    """An engine whose model moves when the test says so."""

    def __init__(self, core: EngineCore, max_steps_ahead: int) -> None:
        self.core = core
        self.orders = StepQueue(core.executor, lambda: None)
        self.steps = Ahead(core, self.orders, max_steps_ahead)
        self.planned: list[int] = []  # tokens of each step
        plan_step = core.plan_step

        def counted(now: float) -> StepPlan:
            plan = plan_step(now)
            self.planned.append(plan.num_tokens)
            return plan

        core.plan_step = counted  # type: ignore[method-assign]

    def turn(self) -> list[EngineToRouter]:
        self.steps.turn()
        self.core.scheduler.kv.pool.check_integrity()
        return [m for _, sent in self.core.take_messages(0.0) for m in sent]

    def run(self) -> list[EngineToRouter]:
        """Turns and steps until nothing is under way."""
        sent = self.turn()
        while self.orders.num_orders:
            self.orders.run_next()
            sent += self.turn()
        assert self.steps.is_idle
        return sent


@pytest.mark.parametrize("ahead", [1, 2])
def test_the_next_steps_are_ordered_before_the_first_has_run(ahead: int) -> None:
    engine = Stepped(make_core(), ahead)
    engine.core.handle("r", submit(PROMPT, max_tokens=6), time.monotonic())
    engine.turn()
    assert engine.planned == [10] + [1] * ahead
    assert engine.steps.is_full
    assert engine.steps.wait_s() is None  # only a message or the step's end brings something
    engine.orders.run_next()
    engine.turn()
    assert engine.planned == [10] + [1] * (ahead + 1)


@pytest.mark.parametrize("ahead", [1, 2])
def test_an_end_by_length_wastes_no_step(ahead: int) -> None:
    core = make_core()
    engine = Stepped(core, ahead)
    core.handle("r", submit(PROMPT, max_tokens=4), time.monotonic())
    core.handle("r", submit(PROMPT[:5], request_id="b", max_tokens=1), time.monotonic())
    messages = engine.run()
    assert engine.planned == [15, 1, 1, 1]
    assert output_of(messages, "a") == expected_tokens(PROMPT, 4)
    assert output_of(messages, "b") == expected_tokens(PROMPT[:5], 1)
    assert at_rest(core)


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_stop_that_is_found_late_is_the_last_that_is_told(ahead: int) -> None:
    core = make_core()
    engine = Stepped(core, ahead)
    expected = expected_tokens(PROMPT, 8)
    params = SamplingParams(temperature=0.0, max_tokens=8, seed=0, ignore_eos=True, stop_token_ids=[expected[2]])
    core.handle("r", replace(submit(PROMPT), params=params), time.monotonic())
    messages = engine.run()
    assert output_of(messages, "a") == expected[: expected.index(expected[2]) + 1]
    assert [type(m) for m in messages if isinstance(m, Tokens | Finished)][-1] is Finished
    assert engine.planned == [10] + [1] * (expected.index(expected[2]) + ahead)
    assert at_rest(core)
    assert EOS not in expected


def test_an_abort_while_steps_are_in_flight_leaves_their_blocks_until_they_end() -> None:
    core = make_core()
    engine = Stepped(core, 2)
    core.handle("r", submit(PROMPT, max_tokens=8), time.monotonic())
    engine.turn()
    blocks = list(core.requests["a", 0].block_tables[0])
    core.handle("r", Abort("a", 0), time.monotonic())
    assert all(map(core.scheduler.kv.pool.is_held, blocks))
    messages = engine.run()
    assert not of_type(messages, Tokens)
    assert at_rest(core)


def test_the_model_s_last_token_is_seen_by_penalties_and_bad_words_of_the_next_step() -> None:
    """The executor keeps it: the scheduler plans without knowing it."""
    core = make_core()
    engine = Stepped(core, 2)
    core.handle("r", submit(PROMPT, max_tokens=6), time.monotonic())
    engine.turn()
    (request,) = core.requests.values()
    assert request.num_in_flight == 3
    assert request.num_tokens == len(PROMPT)
    engine.orders.run_next()
    engine.orders.run_next()
    executor = core.executor
    assert isinstance(executor, StandInExecutor)
    assert executor._tokens["a", 0] == PROMPT + expected_tokens(PROMPT, 2)
    messages = engine.run()
    assert output_of(messages, "a") == expected_tokens(PROMPT, 6)


def test_a_question_for_ended_transfers_is_asked_once_and_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    engine = Stepped(core, 1)
    log: list[str] = []
    ended = Ended(TransferResults({TransferKey("t", 0): TransferOutcome()}, {}, {}, {}))
    execute = core.executor.execute

    def run(plan: StepPlan) -> StepOutput:
        log.append("step")
        return execute(plan)

    def ask() -> Ended:
        log.append("ask")
        return ended

    monkeypatch.setattr(core.executor, "execute", run)
    monkeypatch.setattr(core.executor, "ask_finished", ask)
    settled: list[Ended] = []
    monkeypatch.setattr(core, "settle", settled.append)
    core.handle("r", submit(PROMPT, max_tokens=1), time.monotonic())
    engine.turn()
    engine.steps.wake()
    engine.steps.wake()
    assert engine.orders.num_orders == 2
    while engine.orders.num_orders:
        engine.orders.run_next()
    engine.turn()
    assert (log, settled) == (["step", "ask"], [ended])
    engine.steps.wake()
    engine.run()
    assert settled == [ended, ended]


def test_peers_that_the_workers_refuse_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(options={"fabric": "refused-peers"})
    engine = Stepped(core, 1)
    told: list[list[str]] = []
    refuses = [True]

    def update_peers(added: Sequence[EngineCard], removed: Sequence[EngineCard]) -> None:
        told.append([card.engine for card in added])
        if refuses[0]:
            raise PeerGone("x")

    monkeypatch.setattr(core.executor, "update_peers", update_peers)
    x = make_core(name="x").card
    for expected in (["x"], ["x"], []):
        core.handle("r", Peers([x]), time.monotonic())
        engine.run()
        assert told[-1] == expected
        refuses[0] = len(told) < 1
    assert core.counters.dropped_messages == 1


def test_what_a_step_raises_is_raised_in_the_loop_and_nothing_runs_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    engine = Stepped(core, 2)

    def fail(plan: StepPlan) -> StepOutput:
        raise RankGone("rank 1 went away")

    monkeypatch.setattr(core.executor, "execute", fail)
    core.handle("r", submit(PROMPT), time.monotonic())
    engine.turn()
    assert not engine.orders.run_next()
    with pytest.raises(RankGone, match="rank 1 went away"):
        engine.turn()


def test_the_loop_handles_messages_while_a_step_computes_and_hears_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    begun, go, news = threading.Event(), threading.Event(), threading.Event()
    execute = core.executor.execute
    threads: set[str] = set()

    def gated(plan: StepPlan) -> StepOutput:
        threads.add(threading.current_thread().name)
        begun.set()
        assert go.wait(WAIT_S)
        return execute(plan)

    monkeypatch.setattr(core.executor, "execute", gated)
    steps = make_step_loop(core, 1, news.set)
    core.handle("r", submit(PROMPT, max_tokens=3), time.monotonic())
    steps.turn()
    assert begun.wait(WAIT_S)
    core.handle(
        "r", submit(PROMPT[:4], request_id="b", max_tokens=2), time.monotonic()
    )  # the model has not ended its step
    steps.turn()
    assert steps.wait_s() is None
    assert not news.is_set()
    go.set()
    messages: list[EngineToRouter] = []
    while len(of_type(messages, Finished)) < 2:
        assert news.wait(WAIT_S)
        news.clear()
        steps.turn()
        messages += [m for _, sent in core.take_messages(0.0) for m in sent]
    steps.close()
    assert threads == {"steps"}
    assert output_of(messages, "a") == expected_tokens(PROMPT, 3)
    assert output_of(messages, "b") == expected_tokens(PROMPT[:4], 2)
    assert at_rest(core)


def test_a_stop_drops_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    begun, go, news = threading.Event(), threading.Event(), threading.Event()
    execute = core.executor.execute
    steps_run: list[int] = []

    def gated(plan: StepPlan) -> StepOutput:
        steps_run.append(plan.step_id)
        begun.set()
        assert go.wait(WAIT_S)
        return execute(plan)

    monkeypatch.setattr(core.executor, "execute", gated)
    steps = make_step_loop(core, 2, news.set)
    core.handle("r", submit(PROMPT), time.monotonic())
    steps.turn()
    assert begun.wait(WAIT_S)
    threading.Timer(0.05, go.set).start()  # while `close` waits
    steps.close()
    steps.close()
    assert steps_run == [0]


def on_trial() -> tuple[EngineCore, Stepped]:
    """An engine whose suspect's first step is planned, the router having agreed to its trial."""
    core = make_core()
    engine = Stepped(core, 2)
    core.handle("r", submit(PROMPT, trial_tokens=3, max_tokens=8), time.monotonic())
    (trial,) = [m for m in engine.run() if isinstance(m, Trial)]
    core.handle("r", trial, time.monotonic())
    engine.turn()
    return core, engine


def test_a_suspect_s_steps_follow_each_other_in_turn() -> None:
    core, engine = on_trial()
    for _ in range(3):
        assert engine.orders.num_orders == 1
        engine.orders.run_next()
        engine.turn()
    over = [m for _, sent in core.take_messages(0.0) for m in sent]
    assert not over
    assert core.requests["a", 0].num_tokens == len(PROMPT) + 3


def test_a_trial_that_is_given_up_is_over_when_its_step_has_ended() -> None:
    core, engine = on_trial()
    core.handle("r", Abort("a", 0), time.monotonic())
    messages = engine.turn()
    assert not of_type(messages, Trial)
    messages = engine.run()
    assert of_type(messages, Trial) == [Trial("a", 0, begins=False)]


def test_no_steps_ahead_is_strictly_in_turn() -> None:
    assert isinstance(make_step_loop(make_core(), 0, lambda: None), InTurn)


def test_a_load_begins_beside_as_many_steps_as_may_be_under_way_and_each_of_them_only_once() -> None:
    fabric, now = MemoryFabric(manual=True), time.monotonic()
    MemoryFabric.bind("loop", fabric)
    fields = {"connector": "memory", "options": {"fabric": "loop", "mode": "pull"}, "num_blocks": 32}
    source, core = (make_core(name=name, **fields) for name in "sd")  # type: ignore[arg-type]
    for each in (source, core):
        each.handle("r", Peers([source.card, core.card]), now)
        run(each, now)
    engine = Stepped(core, 2)
    core.handle("r", submit(PROMPT[:4], request_id="b", max_tokens=12), now)
    engine.turn()
    for request_id in ("a", "c"):
        source.handle("r", submit(PROMPT, request_id=request_id, until="first_token", kv="handoff"), now)
        sent = run(source, now)
        (handed,) = of_type(sent, HandedOff)
        output = output_of(sent, request_id)
        asked = submit(PROMPT, request_id=request_id, kv="await_peer", output_token_ids=output, handoff=handed.handoff)
        core.handle("r", asked, now)
        engine.turn()
    assert engine.planned == [4, 1, 1]  # all that may be planned to be computed
    assert engine.orders.num_orders == 4  # and one that begins the first load
    assert [load.started for load in core.external.loads.values()] == [True]
    messages = list[EngineToRouter]()
    while not core.external.is_idle or engine.orders.num_orders:
        engine.orders.run_next()
        messages += engine.turn()
        while fabric.under_way:
            fabric.deliver(0)
            engine.steps.wake()
    messages += engine.run()
    assert output_of(messages, "a") == output_of(messages, "c") == expected_tokens(PROMPT, 4)[1:]
    assert output_of(messages, "b") == expected_tokens(PROMPT[:4], 12)
    assert at_rest(core)
    MemoryFabric.unbind("loop")
