"""How long grammars may hold an engine's steps up, all together."""

from collections.abc import Mapping

from pdkv.grammar.match_time import SPARE_S, MatchTime


def play(time: MatchTime, costs: Mapping[int, float], num_steps: int = 1, *, answers: int = 1) -> dict[int, int]:
    """Steps in which each of these grammars' answers takes so long for a token. Returns in which step they go."""
    gone: dict[int, int] = {}
    for step in range(num_steps):
        for grammar, seconds in costs.items():
            if grammar not in gone:
                for _ in range(answers):
                    time.spend(grammar, seconds, 1)
        gone |= {grammar: step for grammar, _ in time.end_step()}
    return gone


def test_what_tokens_may_take_is_never_too_much() -> None:
    time = MatchTime(is_exact=True)
    assert not play(time, dict.fromkeys(range(512), 0.0002), 1000)


def test_slow_answers_have_a_second_and_some_milliseconds_a_step() -> None:
    assert not play(MatchTime(is_exact=True), {1: 0.005, 2: 0.005, 3: 0.005, 4: 0.005}, 1000)
    gone = play(MatchTime(is_exact=True), {1: 0.030, 2: 0.0001}, 1000)
    assert set(gone) == {1}
    assert 90 < gone[1] < 110


def test_answers_that_share_a_grammar_share_the_second() -> None:
    assert play(MatchTime(is_exact=True), {1: 0.015}, 1000, answers=100) == {1: 0}


def test_many_slow_grammars_go_within_a_few_steps_and_fast_ones_stay() -> None:
    costs = {**dict.fromkeys(range(100), 0.050), **dict.fromkeys(range(100, 120), 0.0002)}
    gone = play(MatchTime(is_exact=True), costs, 200)
    assert not set(gone) & set(range(100, 120))
    assert sum(step < 5 for step in gone.values()) >= 90
    assert len(gone) == 100


def test_a_clock_that_runs_while_the_process_stands_still_only_raises_a_suspicion() -> None:
    time = MatchTime()
    assert not play(time, {1: 10.0})
    assert time.is_exact
    assert not play(time, {1: 0.0001}, 255)
    assert time.is_exact
    play(time, {1: 0.0001})
    assert not time.is_exact


def test_what_a_suspicion_begins_with_is_one_spare_second() -> None:
    time = MatchTime()
    play(time, {1: 10.0})
    assert play(time, {1: SPARE_S + 0.1}) == {1: 0}


def test_a_grammar_that_nobody_has_is_not_chosen() -> None:
    time = MatchTime(is_exact=True)
    play(time, {1: 0.9, 2: 0.05})
    time.forget(1)
    assert set(play(time, {2: 0.2})) == {2}


def test_who_has_been_slow_for_long_within_what_steps_add_does_not_go_for_another() -> None:
    time = MatchTime(is_exact=True)
    for number in range(10, 20):  # now and then others take something, end in time, and keep the clock exact
        assert not play(time, {1: 0.005, number: 0.1})
        time.forget(number)
        assert not play(time, {1: 0.005}, 100)
    assert play(time, {1: 0.005, 2: 1.2}) == {2: 0}


def test_what_one_took_in_excess_is_no_credit_for_the_next() -> None:
    time = MatchTime(is_exact=True)
    assert not play(time, {1: 0.015}, 200)
    assert play(time, {1: 1.2}) == {1: 0}
    assert play(time, {2: 3.0}) == {2: 0}


def test_who_has_paid_back_owes_nothing() -> None:
    time = MatchTime(is_exact=True)
    assert not play(time, {1: 0.9})
    assert not play(time, {1: 0.0001}, 45)  # almost all of it
    assert play(time, {1: 0.25, 2: 0.8}) == {2: 0}


def test_what_one_took_that_is_gone_is_owed_by_nobody_else() -> None:
    """It began an answer again in a step that drew nothing, and was aborted before the next one."""
    time = MatchTime(is_exact=True)
    time.spend(1, 0.9, 1)
    time.forget(1)
    assert not play(time, {2: 0.0003})
    assert play(time, {2: 0.0003, 3: 0.2}) == {3: 0}
    time.spend(4, 30.0, 1)
    time.forget(4)
    assert not play(time, {2: 0.0003})
