"""Budgets, chunks, preemption, admission: the arithmetic of counters."""

from collections import deque

import pytest

from pdkv.engine.core import EngineCore
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.testing.engine import at_rest, make_core, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import Finished, Tokens


def limits(**fields: int) -> SchedulerLimits:
    return SchedulerLimits(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **fields})


def test_a_prompt_of_18_in_chunks_of_8_takes_8_8_2_and_draws_on_the_third_step_only() -> None:
    core = make_core(limits=limits(max_num_batched_tokens=8))
    core.handle("r", submit(list(range(100, 118)), max_tokens=1), 0.0)
    chunks = []
    while core.has_work and core.requests:
        plan = core.scheduler.schedule(0.0)
        chunks.append([(share.num_computed, share.num_scheduled, share.samples) for share in plan.scheduled])
        core.finish_step(core.executor.execute(plan), 0.0)
    assert chunks == [[(0, 8, False)], [(8, 8, False)], [(16, 2, True)]]


def test_the_long_prefill_threshold_bounds_one_requests_share() -> None:
    core = make_core(limits=limits(long_prefill_token_threshold=5))
    for name in ("a", "b"):
        core.handle("r", submit(list(range(100, 112)), request_id=name, max_tokens=1), 0.0)
    plan = core.scheduler.schedule(0.0)
    assert [share.num_scheduled for share in plan.scheduled] == [5, 5]


def test_a_prompt_that_no_other_request_waits_for_is_not_divided() -> None:
    """While another one runs or waits, its share is bounded; when that is over, the rest is computed at once."""
    core = make_core(limits=limits(long_prefill_token_threshold=4))
    core.handle("r", submit(list(range(100, 130)), request_id="alone", max_tokens=2), 0.0)
    assert shares(core) == {"alone": 30}
    core.handle("r", submit(list(range(200, 230)), request_id="long", max_tokens=1), 0.0)
    assert shares(core) == {"alone": 1, "long": 4}
    assert shares(core) == {"long": 26}


def test_running_requests_come_before_waiting_ones_within_the_budget() -> None:
    core = make_core(limits=limits(max_num_batched_tokens=10))
    core.handle("r", submit(list(range(100, 108)), request_id="a"), 0.0)
    core.step(0.0)
    core.handle("r", submit(list(range(200, 215)), request_id="b"), 0.0)
    plan = core.scheduler.schedule(0.0)
    assert [(share.key[0], share.num_scheduled) for share in plan.scheduled] == [("a", 1), ("b", 9)]


def test_no_more_than_max_num_seqs_run() -> None:
    core = make_core(limits=limits(max_num_seqs=2))
    for i in range(4):
        core.handle("r", submit([100 + i, 5], request_id=str(i)), 0.0)
    plan = core.scheduler.schedule(0.0)
    assert [share.key[0] for share in plan.scheduled] == ["0", "1"]


def test_priority_comes_before_arrival() -> None:
    core = make_core(limits=limits(max_num_seqs=1))
    core.handle("r", submit([100], request_id="later", priority=5), 0.0)
    core.handle("r", submit([101], request_id="sooner", priority=-1), 0.0)
    plan = core.scheduler.schedule(0.0)
    assert [share.key[0] for share in plan.scheduled] == ["sooner"]


def shares(core: EngineCore) -> dict[str, int]:
    """Make one step. Returns how many tokens it computed, by request."""
    plan = core.scheduler.schedule(0.0)
    core.finish_step(core.executor.execute(plan), 0.0)
    return {share.key[0]: share.num_scheduled for share in plan.scheduled}


def with_streams(*names: str, num_blocks: int = 64, **bounds: int) -> EngineCore:
    """A core that decodes these requests."""
    core = make_core(num_blocks=num_blocks, limits=limits(**bounds))
    for index, name in enumerate(names):
        core.handle("r", submit([100 + index], request_id=name, max_tokens=40), 0.0)
    while len(core.scheduler.running) < len(names):
        shares(core)
    return core


def test_a_more_urgent_prompt_leaves_a_token_of_each_step_for_every_stream_behind_it() -> None:
    """F71."""
    core = with_streams("a", "b", "c", max_num_batched_tokens=8)
    core.handle("r", submit(list(range(200, 218)), request_id="urgent", priority=-1, max_tokens=9), 0.0)
    assert shares(core) == {"a": 1, "b": 1, "c": 1, "urgent": 5}
    assert shares(core) == {"urgent": 5, "a": 1, "b": 1, "c": 1}
    assert shares(core) == {"urgent": 5, "a": 1, "b": 1, "c": 1}
    assert shares(core) == {"urgent": 3, "a": 1, "b": 1, "c": 1}
    assert shares(core) == {"urgent": 1, "a": 1, "b": 1, "c": 1}


def test_several_urgent_prompts_leave_the_streams_tokens_to_them_too() -> None:
    core = with_streams("a", "b", max_num_batched_tokens=8, long_prefill_token_threshold=4)
    for name in ("first", "second", "third"):
        core.handle("r", submit(list(range(200, 240)), request_id=name, priority=-1), 0.0)
    assert shares(core) == {"a": 1, "b": 1, "first": 4, "second": 2}
    assert shares(core) == {"first": 4, "second": 2, "a": 1, "b": 1}


def test_a_prompt_advances_although_the_streams_behind_it_need_the_whole_budget() -> None:
    core = with_streams("a", "b", "c", max_num_batched_tokens=8)
    core.handle("r", submit(list(range(200, 240)), request_id="urgent", priority=-1), 0.0)
    shares(core)
    core.scheduler.limits = limits(max_num_batched_tokens=3)
    assert shares(core) == {"urgent": 1, "a": 1, "b": 1}


def test_a_prompt_leaves_no_token_to_a_stream_that_waits_for_its_mask() -> None:
    """F81: a tenant's late masks take nothing from another's prompt."""
    core = with_streams("a", "b", "c", max_num_batched_tokens=8)
    for request in core.scheduler.running[:2]:
        request.leave_out()
    core.handle("r", submit(list(range(200, 240)), request_id="urgent", priority=-1), 0.0)
    assert shares(core) == {"c": 1, "urgent": 7}
    assert shares(core) == {"urgent": 7, "c": 1}


def test_a_repeated_prompt_hits_all_but_its_last_block() -> None:
    core = make_core()
    prompt = list(range(100, 112))  # 3 blocks of 4
    run_one(core, prompt, "a")
    core.handle("r", submit(prompt, request_id="b", max_tokens=1), 0.0)
    messages = run(core)
    (finished,) = [m for m in messages if isinstance(m, Finished)]
    assert (finished.sources.local_hit, finished.sources.computed) == (8, 4)


def run_one(core: object, prompt: list[int], request_id: str) -> list[int]:
    core.handle("r", submit(prompt, request_id=request_id), 0.0)  # type: ignore[attr-defined]
    return output_of(run(core), request_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_blocks", [12, 14, 17])
def test_preemption_changes_no_token_and_comes_to_an_end(num_blocks: int) -> None:
    """F12."""
    core = make_core(num_blocks=num_blocks)
    prompts = {str(i): [100 + 10 * i + j for j in range(6 + i)] for i in range(4)}
    for name, prompt in prompts.items():
        core.handle("r", submit(prompt, request_id=name, max_tokens=12), 0.0)
    messages = run(core, max_steps=1000)
    assert core.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert output_of(messages, name) == expected_tokens(prompt, 12)
    assert at_rest(core)


def test_what_a_preempted_request_computes_again_is_counted_as_recomputed() -> None:
    core = make_core(num_blocks=12)
    for i in range(4):
        core.handle("r", submit([100 + 10 * i + j for j in range(7)], request_id=str(i), max_tokens=12), 0.0)
    finished = [m for m in run(core, max_steps=1000) if isinstance(m, Finished)]
    assert sum(m.sources.recomputed for m in finished) > 0
    for message in finished:
        s = message.sources
        assert s.computed + s.recomputed + s.local_hit + s.remote + s.store == 7


def test_a_step_in_flight_keeps_the_blocks_of_a_request_that_left() -> None:
    core = make_core()
    core.handle("r", submit(list(range(100, 110))), 0.0)
    output = core.begin_step(0.0)
    (request,) = core.requests.values()
    blocks = list(request.block_tables[0])
    core.scheduler.remove(request)
    assert all(core.scheduler.kv.pool.is_held(block) for block in blocks)
    core.scheduler.update(output)
    assert not any(core.scheduler.kv.pool.is_held(block) for block in blocks)


def test_steps_that_begin_before_the_last_is_finished_carry_the_next_chunks() -> None:
    """Chunks of a prompt, and tokens behind ones that are not known yet; none behind the last, whose step is known."""
    core = make_core(limits=limits(max_num_batched_tokens=4))
    prompt = list(range(100, 110))
    core.handle("r", submit(prompt, max_tokens=3), 0.0)
    begun, num_tokens = deque[StepOutput](), list[int]()
    schedule = core.scheduler.schedule

    def counting(now: float) -> StepPlan:
        plan = schedule(now)
        num_tokens.append(plan.num_tokens)
        return plan

    core.scheduler.schedule = counting  # type: ignore[method-assign]
    while core.requests:
        begun.append(core.begin_step(0.0))
        if len(begun) > 2:
            core.finish_step(begun.popleft(), 0.0)
    assert num_tokens == [4, 4, 2, 1, 1, 0, 0]
    for output in begun:
        core.finish_step(output, 0.0)
    messages = [m for _, sent in core.take_messages(0.0) for m in sent]
    assert output_of(messages, "a") == expected_tokens(prompt, 3)
    assert [m.position for m in messages if isinstance(m, Tokens)] == [0, 1, 2]
    assert at_rest(core)
