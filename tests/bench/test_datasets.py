"""Data sets in the formats of the field, and prompts of the lengths that were asked for."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from pdkv.bench.datasets import Maker, Shape, load
from pdkv.bench.prefix import repeats
from pdkv.bench.workload import Session, arrivals, one_turn
from pdkv.errors import ConfigError

IDS = Maker(0, as_text=False)

SHAREGPT = """[{"id": "a", "conversations": [{"from": "human", "value": "What is up"}, {"from": "gpt", "value":
"one two three"}]}, {"id": "b", "conversations": [{"from": "human", "value": "alone"}]}]"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,10,0,10,Conversation log
118,GPT-4,20,30,50,API log
"""
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [46, 47]}
{"timestamp": 1500, "input_length": 1030, "output_length": 6, "hash_ids": [46, 48, 49]}
"""
CUSTOM = """{"prompt": "hello there", "output_tokens": 4}
{"prompt": [1, 2, 3], "timestamp": 250}
"""


def written(folder: Path, text: str) -> Path:
    (folder / "data").write_text(text)
    return folder / "data"


def lengths(sessions: Sequence[Session]) -> list[tuple[int, int, float | None]]:
    return [(len(session.turns[0].prompt), session.turns[0].max_tokens, session.at_s) for session in sessions]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("sharegpt", SHAREGPT, [(10, 4, None)]),
        ("burstgpt", BURSTGPT, [(472, 18, 5.0), (20, 30, 118.0)]),
        ("mooncake", MOONCAKE, [(700, 5, 0.0), (1030, 6, 1.5)]),
        ("custom", CUSTOM, [(11, 4, None), (3, 128, 0.25)]),
    ],
)
def test_a_published_format_is_read(
    name: str, text: str, expected: list[tuple[int, int, float | None]], tmp_path: Path
) -> None:
    path = written(tmp_path, text)
    assert lengths(load(name, path, Shape(), IDS)) == expected
    assert {length for _, length, _ in lengths(load(name, path, Shape(output_len=7), IDS))} == {7}


def test_a_traces_requests_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    swapped = "".join(reversed(MOONCAKE.splitlines(keepends=True)))
    assert [s.at_s for s in load("mooncake", written(tmp_path, swapped), Shape(), IDS)] == [0.0, 1.5]


@pytest.mark.parametrize("name", ["random", "conversations", "agents"])
def test_turns_of_all_sessions_are_as_many_as_were_asked_for(name: str) -> None:
    sessions = load(name, None, Shape(num_prompts=37, turns=5, input_len=4), Maker(0, as_text=False))
    assert sum(len(session.turns) for session in sessions) == 37


def test_token_ids_are_never_sent_as_a_text(tmp_path: Path) -> None:
    words = Maker(0, as_text=True)
    first, _ = load("mooncake", written(tmp_path, MOONCAKE), Shape(), words)
    assert len(str(first.turns[0].prompt).split()) == 700
    with pytest.raises(ConfigError, match="line 2: prompt: a text was expected for --endpoint chat, got token ids"):
        load("custom", written(tmp_path, CUSTOM), Shape(), words)


def test_equal_hash_ids_of_a_trace_are_equal_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, MOONCAKE)
    first, second = (s.turns[0].prompt for s in load("mooncake", path, Shape(), IDS))
    [other, _] = (s.turns[0].prompt for s in load("mooncake", path, Shape(), Maker(1, as_text=False)))
    assert other[:512] != first[:512]
    assert first[:512] == second[:512]
    assert first[512:700] != second[512:700]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("sharegpt", "{}", "a JSON list was expected, got dict"),
        ("sharegpt", '[{"a": 1}]', "conversation 0: the field 'conversations' was expected"),
        ("sharegpt", "[]", "no request was found"),
        ("burstgpt", "a,b\n1,2\n", "line 2: Timestamp, Request tokens and Response tokens were expected"),
        ("mooncake", "[1]\n", "line 1: a JSON object was expected"),
        ("mooncake", '{"input_length": 3}\n', "line 1: the field 'hash_ids' was expected"),
        ("custom", '{"prompt": 5}\n', "line 1: prompt: a text or a list of token ids was expected, got '5'"),
        ("custom", "nonsense", "not in the format custom"),
        ("custom", "[" * 100_000, "not in the format custom"),
        ("custom", '{"prompt": "a", "timestamp": NaN}\n', "finite times were expected"),
        ("mooncake", '{"input_length": 1e999, "hash_ids": []}\n', "not in the format mooncake"),
        ("mooncake", '{"input_length": 10000000000, "hash_ids": [], "output_length": 1}\n', "got one of 10000000000"),
    ],
)
def test_a_file_in_another_format_is_refused_by_place(name: str, text: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(name, written(tmp_path, text), Shape(), IDS)
    assert expected in str(caught.value)


def test_files_that_are_absent_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: No such file"):
        load("custom", tmp_path / "absent", Shape(), IDS)
    with pytest.raises(ConfigError, match="a file was expected in --dataset-path"):
        load("custom", None, Shape(), IDS)


def test_random_prompts_have_their_lengths_and_share_their_prefixes() -> None:
    shape = Shape(num_prompts=40, input_len=20, output_len=10, range_ratio=0.5, prefix_len=32, num_prefixes=2)
    found = load("random", None, shape, Maker(1, as_text=False))
    assert all(32 + 10 <= length <= 32 + 30 and 5 <= out <= 15 for length, out, _ in lengths(found))
    assert len({tuple(session.turns[0].prompt[:32]) for session in found}) == 2
    assert found == load("random", None, shape, Maker(1, as_text=False))
    assert found != load("random", None, shape, Maker(2, as_text=False))


def test_repeats_are_what_a_cache_of_blocks_would_find() -> None:
    shape = Shape(num_prompts=10, input_len=8, prefix_len=32)
    found = repeats(load("random", None, shape, Maker(3, as_text=False)), block=16, threshold=0.5, min_length=0)
    assert (found["prompts"], found["tokens"]) == (10, 400)
    assert (found["repeated_tokens"], found["repeated_prompts"]) == (9 * 32, 9)
    assert found["shared_prefixes"] == [{"repeats": 9, "length": 32}]
    most = repeats(load("random", None, shape, Maker(3, as_text=False)), block=16, threshold=0.5, min_length=33)
    assert most["repeated_tokens"] == 0


SESSIONS = [one_turn([1], 1, at_s) for at_s in (0.0, 2.0, 6.0)]


def test_arrivals_are_even_drawn_or_a_traces_own() -> None:
    rng = random.Random(0)
    assert [*arrivals(SESSIONS, rng, rate=float("inf"))] == [0.0, 0.0, 0.0]
    assert [*arrivals(SESSIONS, rng, rate=4.0, burstiness=float("inf"))] == [0.0, 0.25, 0.5]
    assert [*arrivals(SESSIONS, rng, rate=9.0, speed=2.0)] == [0.0, 1.0, 3.0]
    assert [*arrivals(SESSIONS[1:], rng, rate=9.0, speed=2.0)] == [0.0, 2.0]
    for burstiness, squared in ((1.0, 1.0), (0.25, 4.0)):
        at = [*arrivals([SESSIONS[0]] * 20_000, rng, rate=4.0, burstiness=burstiness)]
        gaps = [b - a for a, b in pairwise(at)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(0.25, rel=0.1)
        assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2 == pytest.approx(squared, rel=0.15)
    with pytest.raises(ConfigError, match="these data have no times"):
        list(arrivals([one_turn([1], 1)], rng, rate=1.0, speed=1.0))
