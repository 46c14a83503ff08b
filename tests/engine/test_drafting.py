"""How many guesses are verified: what brings the most tokens a second, by acceptance and measured times."""

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from pdkv.engine.drafting import Drafting
from pdkv.engine.plan import DraftResult

FLAT, STEEP = (lambda rows: 1.0), (lambda rows: float(rows))


def drafting(seconds: Any, **fields: Any) -> Drafting:
    """With steps of up to 32 rows measured."""
    made = Drafting(8, **{"adapts": True, "is_costly": False, **fields})
    for rows in range(1, 33):
        made.choose([request(0.5)], [1], rows)
        made.note_step(rows, seconds(rows), 0.0, 8)
    return made


def request(rate: float, num_in_flight: int = 0) -> Any:
    return Mock(draft_rate=rate, num_in_flight=num_in_flight)


@pytest.mark.parametrize(
    ("seconds", "rates", "expected"),
    [
        (FLAT, [0.9], [8]),
        (STEEP, [0.9], [0]),
        (lambda rows: 1.0 + 0.3 * rows, [0.9, 0.01], [5, 0]),
        (lambda rows: 1.0 if rows <= 4 else 4.0, [0.9], [3]),  # a size from which on steps take longer
        (lambda rows: 1.0 + 0.5 * rows, [0.1, 0.1, 0.1], [0, 0, 0]),
    ],
)
def test_the_most_tokens_a_second_decide(seconds: Any, rates: list[float], expected: list[int]) -> None:
    chosen = drafting(seconds).choose([request(rate) for rate in rates], [8] * len(rates), len(rates))
    assert chosen == expected


def test_rates_follow_what_was_compared() -> None:
    made, guessed = drafting(FLAT), request(0.5)
    made.learn(guessed, DraftResult(4, 4, False, 0))
    assert guessed.draft_rate > 0.75
    for _ in range(10):
        made.learn(guessed, DraftResult(0, 0, True, 0))
    assert guessed.draft_rate < 0.1


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    made = drafting(lambda rows: 1.0 if rows == 1 else 50.0)
    assert made.choose([request(0.9)], [8], 1) == [0]
    for _ in range(5000):
        made.note_step(1, 1.0, 0.0, 8)
    assert made.choose([request(0.9)], [8], 1) != [0]


@pytest.mark.parametrize(("is_costly", "tries"), [(False, [0, 1, 16, 17, 32]), (True, [0, 1, 64, 65, 128])])
def test_guessing_pauses_while_no_guess_is_worth_verifying(is_costly: bool, tries: list[int]) -> None:
    made = drafting(FLAT, is_costly=is_costly)  # after 32 steps without
    assert [step for step in range(1000) if made.num_to_guess(step)][:5] == tries
    made.learn(request(0.9), DraftResult(1, 0, True, 0))
    assert made.num_to_guess(70)


def test_steps_planned_ahead_count_on_as_many_guesses_as_there_were_lately() -> None:
    made = drafting(FLAT)
    for _ in range(60):
        made.note_guesses(0, 8)
    assert made.choose([request(0.9, num_in_flight=1)], [8], 1) == [0]
    assert made.choose([request(0.9)], [8], 1) == [8]


def test_slow_guessing_counts_as_cost() -> None:
    made = drafting(FLAT)
    made.note_step(1, 9.0, 8.0, 8)
    assert made.choose([request(0.8)], [8], 1) == [0]  # at most 4.3 tokens in 9 times the time
    assert [step for step in range(2000) if made.num_to_guess(step)] == [0, 1, 1600, 1601]  # 1 % of the time


def guessed(made: Drafting, rate: float, cost: Any, num_steps: int) -> list[int]:
    """The numbers of guesses of steps of a second each, of one request; `cost` has their seconds."""
    asked = [made.num_to_guess(0)]
    for step in range(1, num_steps):
        count, seconds = made.choose([request(rate)], asked[-1:], 1)[0] if asked[-1] else 0, 0.0
        made.learn(request(rate), DraftResult(count, 0, False, 0))
        asked.append(made.num_to_guess(step))
        seconds = cost(asked[-1]) if asked[-1] else 0.0
        made.note_step(1 + count, 1.0 + seconds, seconds, asked[-1])
    return asked


@pytest.mark.parametrize(("each", "worth"), [(0.1, {5, 6, 7}), (0.3, {2, 3, 4})])
def test_costly_guesses_are_as_many_as_pay(each: float, worth: set[int]) -> None:
    asked = guessed(drafting(FLAT, is_costly=True), 0.8, lambda most: each * most, 200)
    assert sum(most in worth for most in asked[50:]) > 120


def test_costly_guesses_are_all_made_if_fewer_cost_the_same() -> None:
    asked = guessed(drafting(FLAT, is_costly=True), 0.9, lambda most: 0.4, 200)
    assert sum(most == 8 for most in asked[50:]) > 120


@pytest.mark.parametrize("each", [0.02, 0.5, 5.0])
def test_guesses_that_never_pay_take_little_of_the_time(each: float) -> None:
    asked = guessed(Drafting(8, adapts=True, is_costly=True), 0.0, lambda most: each * most, 20_000)
    assert sum(each * most for most in asked[10_000:]) < 0.011 * 10_000
    assert sum(each * most for most in asked) < 0.031 * 20_000


def test_guesses_that_pay_once_in_a_while_take_little_of_the_time() -> None:
    made, in_vain = Drafting(8, adapts=True, is_costly=False), 0.0
    for step in range(10_000):
        guesses = made.num_to_guess(step)
        if is_verified := step % 20 == 0 and guesses > 0:
            made.learn(request(0.1), DraftResult(1, 0, True, 0))
        in_vain += 0.1 * (guesses > 0 and not is_verified)
        made.note_step(1, 1.0 + 0.1 * (guesses > 0), 0.1 * (guesses > 0), guesses)
    assert in_vain < 0.04 * 10_000


@pytest.mark.parametrize(("is_costly", "pauses"), [(True, True), (False, False)])
def test_costly_guessing_pauses_once_many_were_wrong(is_costly: bool, pauses: bool) -> None:
    made = Drafting(8, adapts=True, is_costly=is_costly)
    for _ in range(64):
        made.learn(request(0.5), DraftResult(0, 0, True, 1))
    made.note_step(64, 1.0, 0.01, 8)
    assert (made.num_to_guess(70) == 0) == pauses


def test_guessing_pauses_beside_prompts() -> None:
    made = Drafting(8, adapts=True, is_costly=True)
    for _ in range(24):
        assert made.num_to_guess(70)
        made.note_step(0, 1.0, 0.0, 8)
    assert not made.num_to_guess(70)


def test_new_requests_are_as_guessable_as_others_lately() -> None:
    made = drafting(FLAT)
    new = request(None)  # type: ignore[arg-type]
    assert made.choose([new], [8], 1) != [0]
    for _ in range(200):
        made.learn(request(0.5), DraftResult(0, 0, True, 0))
    assert made.choose([new], [8], 1) == [0]


@pytest.mark.parametrize(("num_rows", "guessing", "right"), [
    (64, 64, 0.1), (64, 64, 0.6), (64, 64, 0.8), (8, 1, 0.9), (32, 2, 0.9)
])  # fmt: skip
def test_a_batch_whose_every_row_costs_the_same_loses_nothing_but_a_few_tries(
    num_rows: int, guessing: int, right: float
) -> None:
    made, draw = Drafting(8, adapts=True, is_costly=False), random.Random(0).random
    batch, seconds, tokens = [SimpleNamespace(draft_rate=None, num_in_flight=0) for _ in range(guessing)], 0, 0
    for _ in range(300):
        chosen = made.choose(batch, [8] * guessing, num_rows)  # type: ignore[arg-type]
        tokens += num_rows - guessing
        for each, count in zip(batch, chosen, strict=True):
            num_right = next((i for i in range(count + 1) if draw() >= right), count + 1)
            accepted = min(num_right, count)
            made.learn(each, DraftResult(count, num_right, num_right <= count, 8))  # type: ignore[arg-type]
            tokens += 1 + accepted
        made.note_step(num_rows + sum(chosen), float(num_rows + sum(chosen)), 0.0, 8)
        seconds += num_rows + sum(chosen)
    assert tokens > 0.95 * seconds


def test_steps_beside_prompts_verify_guesses() -> None:
    """Their times are not noted."""
    made = Drafting(8, adapts=True, is_costly=False)
    chosen = [made.choose([request(0.9)], [8], 1) for _ in range(20)]
    assert [step for step, [count] in enumerate(chosen) if not count] == [0, 8]


def test_some_steps_verify_none_so_that_their_time_is_known() -> None:
    made, plain = drafting(FLAT), []
    for step in range(32, 600):
        if made.choose([request(0.9)], [8], 1) == [0]:
            plain.append(step)
        made.note_step(9, 1.0, 0.0, 8)
    assert plain == [256, 264, 512, 520]
