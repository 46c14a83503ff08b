"""Policies choose by load, hits and turn, and nothing else."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.router.policies import LOAD_GUARD, POLICIES, EngineView, Snapshot, find_policy


def snapshot(prefill: Sequence[int], decode: Sequence[int], match: Mapping[str, int] = {}, **values: Any) -> Snapshot:
    """Engines p0, p1, … and d0, d1, … with these loads."""
    return Snapshot(
        prefill=[EngineView(f"p{i}", load) for i, load in enumerate(prefill)],
        decode=[EngineView(f"d{i}", load) for i, load in enumerate(decode)],
        **({"num_prompt_tokens": 64, "turn": 0, "rng": random.Random(0), "match": lambda: match} | values),
    )


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spreads_equal_engines(name: str) -> None:
    rng = random.Random(0)
    pairs = [POLICIES[name](snapshot([0, 0], [0, 0, 0], turn=turn, rng=rng)) for turn in range(60)]
    assert {p for p, _ in pairs} == {"p0", "p1"}
    counts = Counter(d for _, d in pairs)
    assert set(counts) == {"d0", "d1", "d2"}
    assert min(counts.values()) >= 10


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_an_aggregated_engine_together(name: str) -> None:
    both = [EngineView(f"e{i}", 0, aggregated=True) for i in range(3)]
    for turn in range(9):
        first, second = POLICIES[name](snapshot([], [], turn=turn)._replace(prefill=both, decode=both))
        assert first == second


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_avoids_a_marked_pair_while_there_is_another(name: str) -> None:
    for turn in range(8):
        assert POLICIES[name](snapshot([0], [0, 9], turn=turn, marked=frozenset({("p0", "d0")}))) == ("p0", "d1")
        assert POLICIES[name](snapshot([0], [0], turn=turn, marked=frozenset({("p0", "d0")}))) == ("p0", "d0")


def test_round_robin_takes_turns() -> None:
    pairs = [POLICIES["round_robin"](snapshot([9, 0], [0, 9, 0], turn=turn)) for turn in range(4)]
    assert pairs == [("p0", "d0"), ("p1", "d1"), ("p0", "d2"), ("p1", "d0")]


def test_least_loaded_takes_the_lowest_score() -> None:
    # two waiting weigh 8, seven running weigh 7
    assert POLICIES["least_loaded"](snapshot([8, 7], [5, 3, 4], turn=1)) == ("p1", "d1")


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    rng = random.Random(1)
    chosen = {POLICIES["power_of_two"](snapshot([9, 1, 2], [3], rng=rng))[0] for _ in range(50)}
    assert chosen == {"p1", "p2"}


def test_prefix_aware_takes_the_longest_hit_and_of_equal_hits_the_least_loaded() -> None:
    policy = POLICIES["prefix_aware"]
    assert policy(snapshot([2, 0, 0], [0], {"p0": 64, "p1": 32}))[0] == "p0"
    assert policy(snapshot([2, 1, 0], [0], {"p0": 64, "p1": 64}))[0] == "p1"


def test_prefix_aware_gives_a_hit_up_beyond_the_load_guard() -> None:
    policy = POLICIES["prefix_aware"]
    assert policy(snapshot([LOAD_GUARD, 0], [0], {"p0": 64}))[0] == "p0"
    assert policy(snapshot([LOAD_GUARD + 1, 0], [0], {"p0": 64}))[0] == "p1"


def test_short_hit_is_worth_little_load() -> None:
    policy = POLICIES["prefix_aware"]
    assert policy(snapshot([2, 0], [0], {"p0": 16}))[0] == "p0"
    assert policy(snapshot([3, 0], [0], {"p0": 16}))[0] == "p1"


def test_prefix_aware_sends_a_miss_to_the_least_loaded() -> None:
    assert POLICIES["prefix_aware"](snapshot([3, 1, 2], [4, 5, 0]))[0] == "p1"


def test_prefix_aware_decodes_where_there_is_least_load_and_then_most_prefix() -> None:
    policy = POLICIES["prefix_aware"]
    assert policy(snapshot([0], [0, 0, 1], {"d1": 16, "d2": 160}))[1] == "d1"


def test_unknown_policy_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'fastest'; known: least_loaded, power_of_two, prefix_aware"):
        find_policy("fastest")
