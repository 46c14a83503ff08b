"""Policies choose by tokens, hits and turn, and nothing else."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.router.engines.candidate import EngineView
from pdkv.router.routing.policies import POLICIES, Snapshot, find_policy


def snapshot(loads: Sequence[int], match: Mapping[str, int] = {}, **values: Any) -> Snapshot:
    """Engines e0, e1, … with these loads."""
    engines = [EngineView(f"e{i}", load) for i, load in enumerate(loads)]
    return Snapshot(engines, **({"turn": 0, "rng": random.Random(0), "match": lambda: match} | values))


def choose(policy: str, *arguments: Any, **values: Any) -> str:
    return POLICIES[policy](snapshot(*arguments, **values)).name


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_spreads_equal_engines(name: str) -> None:
    """F25."""
    rng = random.Random(0)
    counts = Counter(choose(name, [0, 0, 0], turn=turn, rng=rng) for turn in range(60))
    assert set(counts) == {"e0", "e1", "e2"}
    assert min(counts.values()) >= 10


def test_round_robin_takes_turns() -> None:
    assert [choose("round_robin", [0, 9, 0], turn=turn) for turn in range(4)] == ["e0", "e1", "e2", "e0"]


def test_least_loaded_takes_the_fewest_tokens() -> None:
    assert choose("least_loaded", [5000, 300, 301], turn=2) == "e1"


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    rng = random.Random(1)
    assert {choose("power_of_two", [9, 1, 2], rng=rng) for _ in range(50)} == {"e1", "e2"}


def test_prefix_aware_takes_the_longest_hit_and_of_equal_hits_the_least_loaded() -> None:
    assert choose("prefix_aware", [32, 0, 0], {"e0": 64, "e1": 16}) == "e0"
    assert choose("prefix_aware", [2, 1, 0], {"e0": 64, "e1": 64}) == "e1"


@pytest.mark.parametrize("hit", [64, 6400])
def test_prefix_aware_gives_a_hit_up_where_twice_as_much_is_queued_as_it_saves(hit: int) -> None:
    """However long the prompt is: what is computed anew drops as much from a cache."""
    assert choose("prefix_aware", [2 * hit - 1, 0], {"e0": hit}, turn=1) == "e0"
    assert choose("prefix_aware", [2 * hit + 1, 0], {"e0": hit}) == "e1"


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware", "power_of_two"])
def test_what_waits_for_a_slow_engine_counts_more(policy: str) -> None:
    engines = [EngineView("slow", 60, 2.0), EngineView("fast", 100)]
    assert POLICIES[policy](Snapshot(engines, 0, random.Random(0), dict)).name == "fast"


def test_prefix_aware_sends_a_miss_to_the_least_loaded() -> None:
    assert choose("prefix_aware", [3, 1, 2]) == "e1"


def test_unknown_policy_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown policy 'fastest'; known: least_loaded, power_of_two, prefix_aware"):
        find_policy("fastest")
