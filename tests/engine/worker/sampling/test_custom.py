"""Logits processors in a batch: each changes its own rows, in its place in the order; a fault is its own request's."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processors import Faulty, example_module

from pdkv.engine.plan import NewRequest
from pdkv.engine.worker.sampling.sampler import SamplingState
from pdkv.errors import InvalidRequest, LogitsProcessorFailed
from pdkv.sampling.logits_processors import ModelInfo, ProcessorSet
from pdkv.sampling.params import SamplingParams

VOCAB = 20
PROMPT = [1, 2, 3]
MODEL = ModelInfo(VOCAB, (), Path())
PROCESSORS = ProcessorSet({"no_repeat": example_module().NoRepeat, "faulty": Faulty}, MODEL)


def asked(arguments: Mapping[str, Any], **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, logits_processors=dict(arguments), **params)


def faulty(how: str, **arguments: Any) -> SamplingParams:
    return asked({"faulty": {"how": how, **arguments}})


PLAIN = SamplingParams(temperature=0.0)


def choose(
    all_params: Sequence[SamplingParams], outputs: Sequence[list[int]], logits: torch.Tensor
) -> tuple[list[int], SamplingState]:
    state = SamplingState(len(all_params), VOCAB, (), PROCESSORS)
    token_ids = np.full((len(all_params), 32), -1, np.int32)
    for slot, (params, output) in enumerate(zip(all_params, outputs, strict=True)):
        state.add(slot, NewRequest((f"r{slot}", 0), 0, PROMPT, output, params, []))
        token_ids[slot, : len(PROMPT) + len(output)] = PROMPT + output
    num_tokens = np.array([len(PROMPT) + len(output) for output in outputs])
    before = logits.clone(), token_ids.copy()
    tokens = state.choose(logits, np.arange(len(all_params)), token_ids, num_tokens)
    torch.testing.assert_close(logits, before[0], rtol=0, atol=0, equal_nan=True)
    assert (token_ids == before[1]).all()
    return tokens.tolist(), state


def falling(num_rows: int) -> torch.Tensor:
    """Token 0 is the likeliest in each row, then 1, 2, …"""
    return -torch.arange(VOCAB, dtype=torch.float32).repeat(num_rows, 1)


def test_each_request_has_its_own_and_sees_its_own_output() -> None:
    short, long = asked({"no_repeat": {"window": 1}}), asked({"no_repeat": {"window": 8}})
    tokens, state = choose([short, PLAIN, long, long], [[0, 1], [0, 1], [0, 1], []], falling(4))
    assert tokens == [0, 0, 2, 0]  # the prompt does not count
    assert not state.failures


def test_it_runs_behind_masks_and_bias_and_before_penalties() -> None:
    window = {"no_repeat": {"window": 4}}
    bias = asked(window, logit_bias={5: 100.0, 4: 99.0})
    penalized = asked(window, presence_penalty=2.0)
    tokens, _ = choose([bias, penalized], [[5], [1]], falling(2))
    assert tokens == [4, 0]
    masked = asked({"faulty": {"how": "allow"}}, allowed_token_ids=(7, 9), bad_words_token_ids=((7,),))
    assert choose([masked], [[]], falling(1))[0] == [9]  # what is forbidden stays so


def test_what_cannot_change_the_likeliest_token_is_left_out_of_greedy_requests() -> None:
    tokens, state = choose([faulty("invariant")], [[]], falling(1))
    assert tokens == [0]
    assert not state._table["custom"].any()
    drawing = SamplingParams(seed=1, logits_processors={"faulty": {"how": "invariant"}})
    assert choose([drawing], [[]], falling(1))[1]._table["custom"].all()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", "RuntimeError: out of luck"),
        ("write", "ValueError: assignment destination is read-only"),
        ("shape", r"returned torch.float32 of \(19,\) instead of floats of \(20,\)"),
        ("dtype", r"returned torch.int64 of \(20,\)"),
        ("nothing", "returned NoneType instead of a tensor"),
        ("nan", r"the logits became NaN or \+inf"),
        ("inf", r"the logits became NaN or \+inf"),
        ("break", "OSError: no such file"),
    ],
)
def test_a_fault_is_its_own_requests(how: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    params = [PLAIN, faulty(how), asked({"no_repeat": {"window": 2}})]
    with caplog.at_level(logging.WARNING):
        tokens, state = choose(params, [[0], [0], [0]], falling(3))
    assert tokens == [0, -1, 1]
    assert list(state.failures) == [1]
    assert state.failures[1].code == LogitsProcessorFailed.code
    assert caplog.records[0].exc_info is not None
    with pytest.raises(AssertionError, match=f"logits processor faulty failed: .*{text}"):
        raise AssertionError(state.failures[1].message)


def test_what_the_model_did_is_not_its_processors_fault() -> None:
    logits = falling(2)
    logits[0, 3] = torch.nan
    _, state = choose([asked({"no_repeat": {"window": 2}}), faulty("nan")], [[0], [0]], logits)
    assert list(state.failures) == [1]


def test_all_tokens_forbidden_is_no_fault_of_the_processor() -> None:
    tokens, state = choose([faulty("forbid"), faulty("refuse")], [[], []], falling(2))
    assert tokens == [-1, -1]
    assert {row: failure.code for row, failure in state.failures.items()} == {1: InvalidRequest.code}
    assert state.failures[1].message == "logits_processors: faulty: not today"


def test_a_slot_forgets_what_was_in_it() -> None:
    tokens, state = choose([faulty("raise")], [[]], falling(1))
    assert tokens == [-1]
    state.remove(0)
    state.add(0, NewRequest(("next", 0), 0, PROMPT, [], PLAIN, []))
    drawn = state.choose(falling(1), np.array([0]), np.array([PROMPT], np.int32), np.array([3]))
    assert drawn.tolist() == [0]
    assert not state.failures
