"""What `python -m guesses` compares."""

import itertools

from guesses.asks import all_asks, predicted
from guesses.cells import BACKENDS, METHODS, MISHAPS, RANKS, TOPOLOGIES, cover, pairs

PASSES = 2


def test_every_two_values_meet_and_there_are_ten_thousand_outputs() -> None:
    cells = cover()
    met = set().union(*map(pairs, cells))
    columns = (METHODS, BACKENDS, TOPOLOGIES, RANKS, MISHAPS)
    wanted = {
        ((i, a), (j, b))
        for (i, first), (j, second) in itertools.combinations(enumerate(columns), 2)
        for a, b in itertools.product(first, second)
        if {a, b} != {"1P1D", "migration"}  # there is no other engine to go on
    }
    assert wanted <= met
    assert PASSES * len(cells) * sum(ask.get("n", 1) for ask in all_asks().values()) >= 10_000


def test_a_prediction_differs_from_the_answer_in_one_character() -> None:
    assert predicted({"seed": 1}, "abcd") == {"seed": 1, "prediction": {"type": "content", "content": "ab#d"}}
