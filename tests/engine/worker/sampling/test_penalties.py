"""Penalties by counts: the logits of a plain recount, whatever happens to slots, at a cost that no context raises."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from no_sync import DeviceTensor, DeviceTensors
from numpy.typing import NDArray

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.sampling import penalties as module
from pdkv.engine.worker.sampling.penalties import PENALTIES, TokenCounts
from pdkv.engine.worker.sampling.sampler import SamplingState
from pdkv.kernels import host
from pdkv.sampling.params import SamplingParams

VOCAB, MAX_SEQS, MAX_LEN = 131, 5, 60
PARAMS = np.dtype([("num_prompt", np.int64), *((name, float) for name in PENALTIES)])
WAYS = [
    pytest.param("compiled", marks=pytest.mark.skipif(not host.can_draw(), reason="no compiler at installation")),
    "torch",
    "device",
]


def recounted(logits: NDArray[np.float32], tokens: Sequence[int], params: Any) -> NDArray[np.float32]:
    """Of one row, token by token."""
    x, one = logits.copy(), np.float32(1.0)
    repetition, presence, frequency = (np.float32(params[n]) for n in PENALTIES)
    for token in set(tokens):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token, count in Counter(tokens[params["num_prompt"] :]).items():
        x[token] = x[token] - frequency * np.float32(count) - presence * one
    return x


class Texts:
    """Some requests in slots, with the tables that a runner has of them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.counts = TokenCounts(MAX_SEQS, VOCAB)
        self.token_ids = np.zeros((MAX_SEQS, MAX_LEN), np.int32)
        self.num_tokens = np.zeros(MAX_SEQS, np.int64)
        self.params = np.zeros(MAX_SEQS, PARAMS)
        for slot in range(MAX_SEQS):
            self.replace(slot)

    def replace(self, slot: int) -> None:
        """Another request, which may have had output elsewhere; it repeats few tokens."""
        rng = self.rng
        self.counts.forget(slot)
        num_prompt, num_output = int(rng.integers(1, 20)), int(rng.integers(0, 10))
        self.num_tokens[slot] = num_prompt + num_output
        self.token_ids[slot] = rng.integers(0, 30, MAX_LEN)
        self.params[slot] = (
            num_prompt,
            rng.choice([1.0, 0.7, 1.3]),
            rng.choice([0.0, 0.5]),
            rng.choice([0.0, 0.2, -1]),
        )

    def check(
        self,
        slots: NDArray[np.int64],
        num_guesses: Sequence[int],
        way: str,
        known_to_host: NDArray[np.int32] | None = None,
    ) -> None:
        """Each slot's row, and one behind each guess."""
        of = np.repeat(slots, np.array(num_guesses) + 1)
        behind = np.concatenate([np.arange(n + 1) for n in num_guesses])
        num_tokens, rows = self.num_tokens[of] + behind, self.rng.permutation(len(of) + 2)[: len(of)]
        logits = self.rng.normal(0, 3, (len(of) + 2, VOCAB)).astype(np.float32)
        expected = logits.copy()
        for row, slot, count in zip(rows, of, num_tokens, strict=True):
            expected[row] = recounted(logits[row], self.token_ids[slot, :count].tolist(), self.params[slot])
        known = self.token_ids if known_to_host is None else known_to_host
        args = rows, of, known, num_tokens, self.params[of]
        if way != "device":
            changed = torch.from_numpy(logits.copy())
            self.counts.penalize(changed, *args)
        else:
            with DeviceTensors() as device:
                there = device.put(torch.from_numpy(logits))
                self.counts.penalize(there, *args)
                changed = device.take(there)
        assert np.array_equal(changed.numpy(), expected)


@pytest.mark.parametrize("way", WAYS)
def test_counts_equal_a_recount(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, draw one token or are right in some guesses, stand still, and draw once more."""
    if way == "torch":
        monkeypatch.setattr(host, "can_draw", lambda: False)
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", 3 * VOCAB)
    texts = Texts(7)
    for _ in range(150):
        rng = texts.rng
        slots = rng.permutation(MAX_SEQS)[: rng.integers(1, MAX_SEQS + 1)]
        guesses = rng.integers(0, 4, len(slots)) * rng.integers(0, 2, len(slots))
        texts.check(slots, guesses.tolist(), way)
        texts.token_ids[slots, texts.num_tokens[slots]] = rng.integers(0, 30, len(slots))  # a guess, or not
        for slot in slots:
            texts.num_tokens[slot] += rng.choice([-1, 0, 1, 1, 2, 3])
            if rng.random() < 0.1 or not texts.params[slot]["num_prompt"] <= texts.num_tokens[slot] < MAX_LEN - 4:
                texts.replace(slot)


@pytest.mark.parametrize("way", ["compiled", "device"])
def test_what_was_drawn_counts_before_the_host_knows_it(way: str) -> None:
    """The host's copy of the output holds other tokens; a row without a choice counts none."""
    texts, slots = Texts(3), np.arange(3)
    texts.check(slots, [0, 0, 0], way)
    before = as_array(texts.counts)[1]
    known_to_host, drawn = texts.token_ids.copy(), torch.tensor([4, -1, 9])
    texts.token_ids[slots, texts.num_tokens[slots]] = drawn.numpy()
    with DeviceTensors() as device:
        texts.counts.add(slots, texts.num_tokens[slots], device.put(drawn) if way == "device" else drawn)
    texts.num_tokens[slots] += 1
    texts.check(slots[[0, 2]], [0, 0], way, known_to_host)
    assert np.array_equal(as_array(texts.counts)[1], before)


def as_array(counts: TokenCounts) -> NDArray[np.int32]:
    assert counts._table is not None
    table = counts._table.inner if isinstance(counts._table, DeviceTensor) else counts._table
    return table.numpy().copy()


def bytes_of_steps(context: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """That go to the logits' device in each of four steps of two requests with so many tokens."""
    sizes = [0]
    upload = module.to_tensor

    def count(array: NDArray[Any], device: torch.device) -> torch.Tensor:
        sizes[-1] += array.nbytes
        return upload(array, device)

    monkeypatch.setattr(module, "to_tensor", count)
    state = SamplingState(2, VOCAB)
    params = SamplingParams(seed=1, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1)
    token_ids = np.random.default_rng(0).integers(0, VOCAB, (2, context + 10)).astype(np.int32)
    for slot in range(2):
        state.add(slot, NewRequest(("r", slot), 0, token_ids[slot, :context].tolist(), [], params, []))
    slots, found = np.arange(2), []
    assert not state.looks_back(slots)
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    for step in range(4):
        token_ids[slots, context + step] = state.choose(logits, slots, token_ids, np.full(2, context + step))
        found.append(sizes[-1])
        sizes.append(0)
    return found


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_no_step_behind_the_first_costs_more_with_more_context(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 32k tokens had 25 MB sent in each step."""
    if not compiled:
        monkeypatch.setattr(host, "can_draw", lambda: False)
    first, *short = bytes_of_steps(10, monkeypatch)
    first_of_long, *long = bytes_of_steps(8_192, monkeypatch)
    assert first_of_long > first + 2 * 8_000
    assert short == long
    assert max(long) <= 100 * 2
