"""A suspect runs alone: others stand still meanwhile, and go on when the router knows that it is over."""

from collections import deque

from pdkv.engine.core import EngineCore
from pdkv.engine.scheduler import SchedulerLimits
from pdkv.engine.trials import ANSWER_TIMEOUT_S
from pdkv.testing.engine import at_rest, make_core, of_type, output_of, run, submit
from pdkv.testing.standin import expected_tokens
from pdkv.wire.messages import Abort, EngineToRouter, Tokens, Trial

PROMPT = list(range(100, 110))
OTHER = list(range(200, 208))


def tokens_of(messages: list[EngineToRouter]) -> list[str]:
    """Who got tokens, in order."""
    return [m.request_id for m in messages if isinstance(m, Tokens)]


def begin(core: EngineCore, num_others: int = 2, *, trial_tokens: int = 2, max_tokens: int = 8) -> list[EngineToRouter]:
    """Others have begun, and a suspect comes; steps until nothing goes on without the router."""
    for index in range(num_others):
        core.handle("r", submit(OTHER, request_id=f"o{index}", max_tokens=max_tokens), 0.0)
    core.step(0.0)
    core.handle("r", submit(PROMPT, max_tokens=max_tokens, trial_tokens=trial_tokens), 0.0)
    return run(core, 0.0)


def answer(core: EngineCore, messages: list[EngineToRouter]) -> list[EngineToRouter]:
    """The router answers the one Trial that is among the messages; what comes then."""
    (trial,) = [m for m in messages if isinstance(m, Trial)]
    core.handle("r", trial, 0.0)
    return run(core, 0.0)


def test_nobody_else_runs_from_the_router_s_first_answer_to_its_second() -> None:
    core = make_core()
    asked = begin(core)
    assert of_type(asked, Trial) == [Trial("a", 0, begins=True)]
    assert "a" not in tokens_of(asked)
    assert not core.has_work  # it stands still
    alone = answer(core, asked)
    assert tokens_of(alone) == ["a", "a"]
    assert of_type(alone, Trial) == [Trial("a", 0, begins=False)]
    assert not core.has_work
    after = answer(core, alone)
    messages = asked + alone + after
    assert output_of(messages, "a") == expected_tokens(PROMPT, 8)
    for name in ("o0", "o1"):
        assert output_of(messages, name) == expected_tokens(OTHER, 8)
    assert at_rest(core)


def test_steps_that_are_under_way_end_before_it_is_asked() -> None:
    core = make_core()
    core.handle("r", submit(OTHER, request_id="o", max_tokens=4), 0.0)
    under_way = deque([core.begin_step(0.0)])
    core.handle("r", submit(PROMPT, trial_tokens=1), 0.0)
    for _ in range(3):
        under_way.append(core.begin_step(0.0))
        assert [m for _, sent in core.take_messages(0.0) for m in sent if isinstance(m, Trial)] == []
        if len(under_way) == 3:
            break
    while under_way:
        core.finish_step(under_way.popleft(), 0.0)
    assert of_type(run(core, 0.0), Trial) == [Trial("a", 0, begins=True)]


def test_one_suspect_after_the_other() -> None:
    core = make_core()
    for name in ("a", "b"):
        core.handle("r", submit(PROMPT, request_id=name, max_tokens=3, trial_tokens=2), 0.0)
    messages: list[EngineToRouter] = []
    latest = run(core, 0.0)
    seen = []
    for _ in range(4):
        seen += of_type(latest, Trial)
        messages += latest
        latest = answer(core, latest)
    messages += latest
    assert seen == [Trial(name, 0, begins) for name in ("a", "b") for begins in (True, False)]
    assert tokens_of(messages)[:2] == ["a", "a"]
    for name in ("a", "b"):
        assert output_of(messages, name) == expected_tokens(PROMPT, 3)
    assert at_rest(core)


def test_a_suspect_that_ends_or_is_aborted_lets_the_others_go_on() -> None:
    for ends_by in ("its length", "an abort", "an abort before the answer"):
        core = make_core()
        asked = begin(core, trial_tokens=5, max_tokens=4)
        if ends_by == "an abort before the answer":
            core.handle("r", Abort("a", 0), 0.0)
            over = run(core, 0.0)
        elif ends_by == "an abort":
            core.handle("r", of_type(asked, Trial)[0], 0.0)
            core.step(0.0)
            core.handle("r", Abort("a", 0), 0.0)
            over = run(core, 0.0)
        else:
            over = answer(core, asked)
        assert of_type(over, Trial) == [Trial("a", 0, begins=False)], ends_by
        messages = asked + over + answer(core, over)
        for name in ("o0", "o1"):
            assert output_of(messages, name) == expected_tokens(OTHER, 4), ends_by
        assert at_rest(core)


def test_a_router_that_leaves_or_does_not_answer_holds_nobody_up() -> None:
    core = make_core()
    messages = begin(core)
    core.router_joined("s", "1")
    core.handle("s", Trial("a", 0, begins=True), 0.0)  # it is not the one that was asked
    assert core.counters.dropped_messages == 1
    assert core.next_deadline() == ANSWER_TIMEOUT_S
    core.step(ANSWER_TIMEOUT_S)
    messages += run(core)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 8)
    assert at_rest(core)

    core = make_core()
    core.router_joined("s", "1")
    core.handle("s", submit(OTHER, request_id="o", max_tokens=6), 0.0)
    begin(core, 0)
    core.router_left("r")
    messages = run(core)
    assert output_of(messages, "o")[-1:] == expected_tokens(OTHER, 6)[-1:]
    assert at_rest(core)


def test_a_suspect_that_finds_no_blocks_while_others_stand_still_waits_for_them() -> None:
    """Others hold the pool: standing still for ever would help nobody."""
    core = make_core(num_blocks=8, limits=SchedulerLimits(8, 64))
    messages = begin(core, 2, trial_tokens=4, max_tokens=8)
    for _ in range(40):
        trials = of_type(messages, Trial)
        if core.requests and not core.has_work:
            core.handle("r", trials[-1], 0.0)
        messages += run(core, 0.0)
    assert output_of(messages, "a") == expected_tokens(PROMPT, 8)
    for name in ("o0", "o1"):
        assert output_of(messages, name) == expected_tokens(OTHER, 8)
    assert at_rest(core)
