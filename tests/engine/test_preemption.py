"""Who gives way when blocks run out: the least urgent one, once, however late updates come."""

from collections import deque
from typing import NamedTuple

import pytest
from state_machine.standin_store import STAND_IN_STORE

from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import EngineToRouter, Finished, Tokens

URGENT, NORMAL, IDLE = -9, 0, 9


def prompt_of(index: int, length: int = 6) -> list[int]:
    """Prompts that share no block."""
    return [100 + 20 * index + i for i in range(length)]


def names(requests: object) -> list[str]:
    return [request.submit.request_id for request in requests]  # type: ignore[attr-defined]


def steps_with_tokens(core: EngineCore, *, max_steps: int = 300) -> tuple[list[set[str]], list[EngineToRouter]]:
    """Run to the end. Which requests got a token, by step; and all messages."""
    steps, messages = [], []
    for _ in range(max_steps):
        if not core.has_work:
            break
        core.step(0.0)
        core.scheduler.kv.pool.check_integrity()
        sent = [m for _, batch in core.take_messages(0.0) for m in batch]
        messages += sent
        steps.append({m.request_id for m in sent if isinstance(m, Tokens)})
    assert at_rest(core)
    return steps, messages


@pytest.mark.parametrize("urgent_tokens", [4, 5, 6, 7])
@pytest.mark.parametrize("idle_tokens", [4, 5, 6, 7])
def test_the_most_urgent_request_never_misses_a_step(urgent_tokens: int, idle_tokens: int) -> None:
    """Whichever of them meets the empty pool: it began last, so that it would be the first victim by age."""
    core = make_core(num_blocks=9, max_model_len=36)
    core.handle("r", submit(prompt_of(0, idle_tokens), request_id="idle", max_tokens=20, priority=IDLE), 0.0)
    core.step(0.0)
    core.handle("r", submit(prompt_of(1, urgent_tokens), request_id="urgent", max_tokens=20, priority=URGENT), 0.0)
    steps, messages = steps_with_tokens(core)
    assert core.scheduler.num_preemptions > 0
    assert all("urgent" in step for step in steps[:20])
    assert output_of(messages, "urgent") == expected_tokens(prompt_of(1, urgent_tokens), 20)
    assert output_of(messages, "idle")[-19:] == expected_tokens(prompt_of(0, idle_tokens), 20)[-19:]


def test_a_preempted_request_waits_behind_more_urgent_ones_and_before_its_equals() -> None:
    core = make_core(num_blocks=9, limits=SchedulerLimits(2, 64), max_model_len=36)
    core.handle("r", submit(prompt_of(0), request_id="normal", max_tokens=24, priority=NORMAL), 0.0)
    core.handle("r", submit(prompt_of(1), request_id="idle", max_tokens=24, priority=IDLE), 0.0)
    core.step(0.0)
    core.handle("r", submit(prompt_of(2), request_id="urgent", max_tokens=4, priority=URGENT), 0.0)
    core.handle("r", submit(prompt_of(3), request_id="idle too", max_tokens=4, priority=IDLE), 0.0)
    while not core.scheduler.num_preemptions:
        core.step(0.0)
    assert names(core.scheduler.running) == ["normal"]
    assert names(core.scheduler.waiting) == ["urgent", "idle", "idle too"]
    finished = [m.request_id for m in run(core) if isinstance(m, Finished)]
    assert finished.index("urgent") < finished.index("idle")
    assert at_rest(core)


def test_the_urgent_one_gets_the_tokens_of_a_step_before_who_began_earlier() -> None:
    core = make_core(limits=SchedulerLimits(8, 4))
    core.handle("r", submit(prompt_of(0, 12), request_id="idle", priority=IDLE), 0.0)
    core.step(0.0)
    core.handle("r", submit(prompt_of(1, 2), request_id="urgent", priority=URGENT), 0.0)
    core.step(0.0)  # what runs comes before what waits
    core.step(0.0)
    core.step(0.0)
    plan = core.scheduler.schedule(0.0)
    assert [share.key[0] for share in plan.scheduled] == ["urgent", "idle"]


def test_among_equals_the_last_to_begin_gives_way_and_is_the_first_to_come_again() -> None:
    core = make_core(num_blocks=9, limits=SchedulerLimits(3, 64), max_model_len=36)
    for index, name in enumerate(("first", "second", "third", "fourth")):
        core.handle("r", submit(prompt_of(index), request_id=name, max_tokens=20), 0.0)
    while not core.scheduler.num_preemptions:
        core.step(0.0)
    assert names(core.scheduler.running) == ["first", "second"]
    assert names(core.scheduler.waiting) == ["third", "fourth"]
    run(core)
    assert at_rest(core)


@pytest.mark.parametrize("num_requests", [2, 3, 4])
def test_who_comes_again_stays_until_a_block_is_full(num_requests: int) -> None:
    """It does not come back for a step only to give way again."""
    core = make_core(num_blocks=13, max_model_len=52)
    for index in range(num_requests):
        core.handle("r", submit(prompt_of(index), request_id=str(index), max_tokens=30), 0.0)
    lives: list[int] = []  # tokens that a request drew between coming again and giving way
    drawn: dict[str, int] = {}  # since it came again
    while core.requests:
        before = core.scheduler.num_preemptions
        core.step(0.0)
        gone = core.scheduler.waiting.first(core.scheduler.num_preemptions - before)
        lives += [drawn[name] for name in names(gone) if name in drawn]
        drawn |= dict.fromkeys(names(gone), 0)
        for _, sent in core.take_messages(0.0):
            for message in sent:
                if isinstance(message, Tokens) and message.request_id in drawn:
                    drawn[message.request_id] += len(message.token_ids)
    assert core.scheduler.num_preemptions
    assert all(num_tokens >= 4 for num_tokens in lives), lives
    assert at_rest(core)


class Pressure(NamedTuple):
    """More requests than the pool holds."""

    num_blocks: int
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    mode: str | None = None  # of the memory connector


class Run(NamedTuple):
    """What a run under pressure took."""

    preemptions: int
    most_in_a_step: int
    steps: int


def run_lagging(pressure: Pressure, lag: int) -> Run:
    """Run with `lag` steps begun beyond the one that is finished next; checks tokens and blocks."""
    options = {"mode": pressure.mode, "fabric": f"lag-{pressure}-{lag}"} if pressure.mode else None
    name = STAND_IN_STORE if pressure.mode == "store" else "memory"
    core = make_core(num_blocks=pressure.num_blocks, connector=name, options=options)
    prompts = {str(i): prompt_of(i, pressure.prompt_tokens + i % 3) for i in range(pressure.num_requests)}
    for name, prompt in prompts.items():
        core.handle("r", submit(prompt, request_id=name, max_tokens=pressure.output_tokens), 0.0)
    begun, messages = deque(), []
    most = num_steps = 0
    while core.requests:
        before = core.scheduler.num_preemptions
        begun.append(core.begin_step(0.0))
        num_steps += 1
        most = max(most, core.scheduler.num_preemptions - before)
        if len(begun) > lag:
            core.finish_step(begun.popleft(), 0.0)
        core.scheduler.kv.pool.check_integrity()
        messages += [m for _, sent in core.take_messages(0.0) for m in sent]
        assert num_steps < 1000
    for output in begun:
        core.finish_step(output, 0.0)
    run(core)
    for name, prompt in prompts.items():
        assert output_of(messages, name) == expected_tokens(prompt, pressure.output_tokens)
    assert at_rest(core)
    core.shutdown()
    return Run(core.scheduler.num_preemptions, most, num_steps)


@pytest.mark.parametrize(
    "pressure",
    [Pressure(24, 8, 6, 24), Pressure(24, 8, 8, 40), Pressure(30, 8, 4, 60), Pressure(30, 8, 4, 60, "store")],
    ids=str,
)
def test_late_updates_cost_few_preemptions_and_steps(pressure: Pressure) -> None:
    """Blocks of a victim come free with the update of its last step: until then nobody else has to give way.

    The bound: a third more preemptions, since what is drawn for a victim meanwhile is drawn again; and a wait of `lag`
    steps, and one step again, for each.
    """
    prompt_runs = [run_lagging(pressure, lag) for lag in (0, 1, 2)]
    at_once = prompt_runs[0]
    assert at_once.preemptions > 5
    for lag, late in enumerate(prompt_runs):
        assert late.most_in_a_step == 1
        assert late.preemptions <= at_once.preemptions * 4 / 3
        assert late.steps <= at_once.steps + (lag + 1) * late.preemptions + 2 * lag


def test_blocks_that_come_back_with_this_very_plan_cost_nobody_his_own() -> None:
    """A connector that observes steps holds an ended request's blocks until the next plan has told it of them."""
    core = make_core(
        num_blocks=6, connector=STAND_IN_STORE, options={"mode": "store", "fabric": "kept"}, max_model_len=24
    )
    core.handle("r", submit(prompt_of(0, 8), request_id="short", max_tokens=1), 0.0)
    core.handle("r", submit(prompt_of(1, 8), request_id="a", max_tokens=5), 0.0)
    core.handle("r", submit(prompt_of(2, 8), request_id="b", max_tokens=5), 0.0)
    messages = run(core)
    for index, name in ((1, "a"), (2, "b")):
        assert output_of(messages, name) == expected_tokens(prompt_of(index, 8), 5)
    assert core.scheduler.num_preemptions == 0
    assert at_rest(core)
    core.shutdown()
