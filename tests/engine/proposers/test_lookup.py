"""Proposers without a model: each looks only where it may, within its bounds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdkv.engine.plan import NewRequest
from pdkv.engine.proposers.base import Asked, Place, Proposer
from pdkv.engine.proposers.registry import make_proposer
from pdkv.errors import ConfigError
from pdkv.sampling.params import SamplingParams

LENGTH = 5000


class Batch:
    """The requests of one proposer, a slot each."""

    def __init__(self, **config: Any) -> None:
        self.proposer = make_proposer({name: str(value) for name, value in config.items()})
        assert isinstance(self.proposer, Proposer)
        self.proposer.attach(Place(Path(), 1000, 4, LENGTH))
        self.token_ids = np.zeros((4, LENGTH + 1), np.int32)
        self.num_tokens = np.zeros(4, np.int64)
        self.requests: dict[int, NewRequest] = {}

    def add(self, slot: int, prompt: list[int], *, tenant: str = "", prediction: Sequence[int] = ()) -> None:
        request = NewRequest(("r", slot), 0, prompt, [], SamplingParams(), [[]], None, list(prediction), tenant)
        self.requests[slot] = request
        self.token_ids[slot, : len(prompt)], self.num_tokens[slot] = prompt, len(prompt)
        self.proposer.add(slot, request)

    def say(self, slot: int, *token_ids: int) -> None:
        start = self.num_tokens[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids
        self.num_tokens[slot] += len(token_ids)

    def end(self, slot: int) -> None:
        self.proposer.remove(slot, self.token_ids[slot, : self.num_tokens[slot]])

    def guesses(self, slot: int, most: int = 3) -> list[int]:
        slots = np.array([slot])
        asked = Asked([self.requests[slot]], slots, self.token_ids, self.num_tokens[slots], np.array([most]))
        counts, token_ids = self.proposer.propose(asked)
        return token_ids[0, : counts[0]].tolist()


def test_ngrams_are_looked_up_in_the_request_s_own_tokens() -> None:
    batch = Batch(method="ngram", prompt_lookup_min=1)
    batch.add(0, [1, 2, 3, 4, 5])
    batch.add(1, [2, 9, 9, 9])
    batch.say(0, 2)
    assert batch.guesses(0) == [3, 4, 5]
    assert batch.guesses(0, most=1) == [3]
    batch.end(0)
    batch.add(0, [8, 7, 2])  # the slot's next request
    assert batch.guesses(0) == []


def test_a_prediction_is_followed_and_found_again_behind_a_change() -> None:
    batch = Batch(method="prediction")
    batch.add(0, [1], prediction=range(10, 40))
    batch.say(0, 10)
    assert batch.guesses(0) == [11, 12, 13]
    batch.say(0, 11, 500, 501, 502, 20, 21)
    assert batch.guesses(0) == [22, 23, 24]
    batch.add(1, [10, 11])
    assert batch.guesses(1) == []


def test_earlier_outputs_are_found_by_the_same_tenant_alone() -> None:
    batch = Batch(method="suffix", suffix_decoding_max_spec_factor=8)
    batch.add(0, [1, 2], tenant="a")
    batch.say(0, 30, 31, 32, 33, 34)
    batch.end(0)
    for tenant, expected in (("a", [32, 33, 34]), ("b", [])):
        batch.add(1, [30, 31], tenant=tenant)
        assert batch.guesses(1) == expected
        batch.end(1)
    batch.add(2, [1, 2, 9], tenant="a")  # what another request was asked is no output
    batch.say(2, 1, 2)
    assert batch.guesses(2)[:1] == [9]


def test_earlier_outputs_stay_within_their_bound() -> None:
    """A tenant has an eighth of it at most, and many of them push out those that have said nothing for longest."""
    batch = Batch(method="suffix", suffix_cache_bytes="1MiB")
    outputs = batch.proposer._outputs  # type: ignore[attr-defined]
    draw = np.random.default_rng(1)
    for round_number in range(60):
        batch.add(0, [1], tenant=f"t{round_number % 20}" if round_number < 40 else "loud")
        batch.say(0, *draw.integers(0, 1000, 1800))
        batch.end(0)
        assert outputs.num_bytes <= 1 << 20
    assert outputs.number("loud")
    assert outputs.number("t19")  # "loud" could not push everything out
    last = batch.token_ids[0, 1700:1702].tolist()
    batch.add(1, last, tenant="loud")
    assert batch.guesses(1, most=1) == batch.token_ids[0, 1702:1703].tolist()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "requires the key method, one of"),
        ({"method": "eagle"}, "unknown proposer 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": "0"}, "num_speculative_tokens: a whole number of at least 1"),
        ({"method": "ngram", "num_speculative_tokens": "-1"}, "got '-1'"),
        ({"method": "ngram", "num_speculative_tokens": "1000000"}, "up to 64 was expected, got '1000000'"),
        ({"method": "ngram", "prompt_lookup_min": "4", "prompt_lookup_max": "3"}, "must be at most prompt_lookup_max"),
        ({"method": "suffix", "prompt_lookup_max": "3"}, "speculative_config of suffix: unknown option"),
        ({"method": "ngram", "quantization": "fp8"}, "unknown option 'quantization'"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_by_name(config: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_proposer({"num_speculative_tokens": "3", **config})
