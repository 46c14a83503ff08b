"""Lookups of the last tokens in texts, compiled and by numpy: what follows the longest, newest match."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from pdkv.kernels import ngrams
from pdkv.kernels.ngrams import Job, Texts


@pytest.fixture(params=["compiled", "numpy"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(ngrams, "_look_up", lambda: None)
    else:
        assert ngrams.available()


def guess(
    own: Sequence[int], wanted: int = 4, least: int = 2, most: int = 5, others: Sequence[Sequence[int]] = ()
) -> list[int]:
    """What is guessed behind `own`, looked up in itself or in the first of `others`."""
    tokens = np.array(own, np.int32)
    texts = Texts(2)
    texts.set(0, tokens, 0, least)
    jobs = [Job(tokens.ctypes.data, len(own), 0, least, most, False, 0, wanted)]
    for other in others:
        texts.set(1, np.array(other, np.int32), len(other), least)
        jobs = [Job(tokens.ctypes.data, len(own), 1, least, most, False, 0, wanted)]
    found = texts.look_up(np.array(jobs, np.int64), 1, wanted)
    return found.token_ids[0, : found.counts[0]].tolist()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the newest of equally long ones goes on as it repeats itself
        ([7, 1, 2, 9, 3, 1, 2, 8, 7, 1, 2], [9, 3, 1, 2]),  # the longest
        ([1, 1, 1], [1, 1, 1, 1]),
        ([1, 2, 3, 4], []),
        ([5, 5][:1], []),
        ([], []),
    ],
)  # fmt: skip
def test_what_follows_the_longest_newest_match_is_guessed(own: list[int], expected: list[int]) -> None:
    assert guess(own) == expected


def test_a_guess_ends_with_another_text_and_where_an_output_ends() -> None:
    assert guess([9, 1, 2], others=[[1, 2, 3]]) == [3]
    assert guess([9, 1, 2], others=[[1, 2, 3, -1, 4, 4, 4]]) == [3]
    assert guess([9, 1, 2], others=[[1, 2, -1, 4]]) == []
    assert guess([9, 1, 2], others=[[8, 8, 1, 2]]) == []


def test_a_followed_text_is_taken_up_again_behind_a_token_that_differs() -> None:
    expected, tokens, texts = np.arange(10, 30, dtype=np.int32), np.zeros(20, np.int32), Texts(1)
    texts.set(0, expected, len(expected), 2)
    guesses = []
    for i, token_id in enumerate([10, 11, 7, 13, 14, 15]):
        tokens[i] = token_id
        job = Job(tokens.ctypes.data, i + 1, 0, 2, 8, True, 0, 2)
        found = texts.look_up(np.array([job], np.int64), 1, 2)
        guesses.append(found.token_ids[0, : found.counts[0]].tolist())
    assert guesses == [[11, 12], [12, 13], [], [14, 15], [15, 16], [16, 17]]


def test_a_growing_text_is_indexed_as_it_grows() -> None:
    draw, tokens = random.Random(3), np.zeros(300, np.int32)
    texts, seen = Texts(1), list[int]()
    texts.set(0, tokens, 0, 2)
    for _ in range(300):
        tokens[len(seen)] = draw.randrange(12)
        seen.append(int(tokens[len(seen)]))
        job = Job(tokens.ctypes.data, len(seen), 0, 2, 5, False, 0, 3)
        found = texts.look_up(np.array([job], np.int64), 1, 3)
        assert found.token_ids[0, : found.counts[0]].tolist() == guess(seen, wanted=3)
