"""Each proposer by its configuration: outputs stay the same, and guesses of each kind are verified."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from twin_device import TwinDevice

from pdkv import LLM, SamplingParams
from pdkv.config import DEFAULT_MODEL
from pdkv.engine.worker.draft_model import DraftModelProposer
from pdkv.engine.worker.pending import MAX_PENDING
from pdkv.engine.worker.queued_step import QueuedStep
from pdkv.engine.worker.threads import StepThreads
from pdkv.errors import ConfigError
from pdkv.kernels import streams
from pdkv.proposers import NewRequest, TokenProposer

PROMPTS = [[7, 8, 9, 10, 11, 12, 7, 8], [20, 21, 22] * 6, [30, 31, 32, 33] * 4, [5]]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=1, n=2, stop_token_ids=[50]),
    SamplingParams(max_tokens=40, temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5, ignore_eos=True),
    SamplingParams(
        max_tokens=37, temperature=0.9, seed=2, min_tokens=20, stop="K", bad_words_token_ids=((7,), (9, 11))
    ),
]


def generate(
    model: Path, config: dict[str, Any] | None, count: int = len(PROMPTS), **options: Any
) -> tuple[list[Any], dict[str, float]]:
    """The choices of two equal calls, one after the other, and the counts of guesses."""
    more = {"speculative_config": config} if config else {}
    fields = {"kv_cache_memory": 24 * 16 * 512, "max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    with LLM(model, threads=1, device="cpu", in_turn_below_s=0.0, **fields, **more, **options) as llm:
        asked = PROMPTS[:count], PARAMS[:count]
        outputs = [*llm.generate(*asked, use_tqdm=False), *llm.generate(*asked, use_tqdm=False)]
        counts = {metric.name.rpartition("num_")[2]: metric.value for metric in llm.get_metrics()}
    choices = [choice for output in outputs for choice in output.outputs]
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, [
            {i: pytest.approx(e[i].logprob, abs=1e-5) for i in e} for e in c.logprobs or ()
        ])
        for c in choices
    ], counts  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    return generate(model, None)[0]


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> str:
    """The proposer of the page."""
    page = (Path(__file__).parents[2] / "docs" / "speculation.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    module = ModuleType("said_again")
    monkeypatch.setitem(sys.modules, "said_again", module)
    exec(code, module.__dict__)
    return "said_again:Again"


@pytest.mark.parametrize("method", ["ngram", "suffix", "again"])
def test_a_proposer_changes_no_token_and_no_logprob(
    model: Path, expected: list[Any], method: str, request: pytest.FixtureRequest
) -> None:
    name = request.getfixturevalue("again") if method == "again" else method
    own = {"prompt_lookup_min": 1} if method == "ngram" else {}
    found, counts = generate(model, {"method": name, "num_speculative_tokens": 3, "adaptive": False, **own})
    assert found == expected
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert (method == "again") == (counts["accepted_tokens"] == counts["draft_tokens"])


class Broken(TokenProposer):
    """Raises, or guesses what is no token."""

    num_calls = 0

    def guess(self, request: NewRequest, token_ids: np.ndarray, most: int) -> list[int]:
        Broken.num_calls += 1
        if Broken.num_calls % 3 == 0:
            raise RuntimeError("no idea")
        return [[1 << 40], [-1, 5], [5, 1 << 33]][Broken.num_calls // 3 % 3]


def test_a_proposer_that_fails_costs_guesses_alone(
    model: Path, expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    found, counts = generate(model, {"method": f"{__name__}:Broken", "adaptive": False})
    assert found == expected
    assert counts["draft_tokens"] > 0  # the token before one that is out of range
    assert "the proposer Broken failed" in caplog.text


class Wrong(TokenProposer):
    """Guesses what is never drawn, and counts how often it is asked."""

    num_calls = 0

    def guess(self, request: NewRequest, token_ids: np.ndarray, most: int) -> list[int]:
        Wrong.num_calls += 1
        return [3]


def test_a_proposer_that_is_never_right_is_hardly_asked_any_more(model: Path) -> None:
    params = SamplingParams(max_tokens=100, temperature=0.0, logit_bias={3: -100}, ignore_eos=True)
    with LLM(model, threads=1, device="cpu", speculative_config={"method": f"{__name__}:Wrong"}) as llm:
        llm.generate([[7, 8, 9]], params, use_tqdm=False)
    assert 0 < Wrong.num_calls < 60


def test_a_wrong_configuration_is_refused_before_the_model_is_loaded(model: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens: a whole number of at least 1 and up to 64"):
        LLM(model, speculative_config={"method": "ngram", "num_speculative_tokens": 0})


def test_a_draft_model_changes_no_token_and_is_right_where_it_agrees(model: Path, expected: list[Any]) -> None:
    """The model drafts for itself: sampled guesses are right, too, since both draw with the same random numbers."""
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "adaptive": False}
    found, _ = generate(model, {**config, "draft_max_num_batched_tokens": 5, "draft_kv_cache_memory": 8 * 16 * 512})
    assert found == expected  # with room for some of the requests
    _, counts = generate(model, config, 2)  # without penalties, of which it knows nothing
    assert counts["accepted_tokens"] > 0.95 * counts["draft_tokens"] > 50


def test_a_draft_model_guesses_nothing_beyond_the_longest_request(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Right guesses bring a request closer to its end than the plan knows that asks for more of them."""
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "adaptive": False}
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    with LLM(model, threads=1, device="cpu", max_model_len=64, speculative_config=config) as llm:
        outputs = llm.generate([[7] * length for length in range(40, 48)], params, use_tqdm=False)
    assert {len(output.prompt_token_ids) + len(output.outputs[0].token_ids) for output in outputs} == {64}
    assert "failed" not in caplog.text


def test_a_draft_model_s_steps_are_queued_on_a_device(
    model: Path, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is computed while the next one is launched; more may not be."""
    unfinished: list[int] = []
    launch = DraftModelProposer._launch

    def launched(self: DraftModelProposer, shares: Any, *, samples: bool) -> Any:
        steps.append(launch(self, shares, samples=samples))
        unfinished.append(sum(isinstance(step, QueuedStep) and step._output is None for step in steps))
        num_blocks.add(len(self._free) + sum(len(drafted.blocks) for drafted in self._known.values()))
        return steps[-1]

    steps: list[Any] = []
    num_blocks = set[int]()
    monkeypatch.setattr(DraftModelProposer, "_launch", launched)
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "adaptive": False}
    found, counts = generate(model, config, max_steps_ahead=0)
    assert found == expected
    assert counts["accepted_tokens"] > 50
    assert max(unfinished) == 2 <= 1 + MAX_PENDING
    assert len(num_blocks) == 1  # each is free, or of a request that the target computes


def test_a_draft_model_computes_with_threads_of_its_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, which pay for the target, would only make its small steps slower."""
    used_for, propose = StepThreads.used_for, DraftModelProposer.propose
    counts = list[int]()

    @contextmanager
    def noted(self: StepThreads, num_tokens: int) -> Iterator[None]:
        with used_for(self, num_tokens):
            counts.append(torch.get_num_threads())
            yield

    def proposed(self: DraftModelProposer, asked: Any) -> Any:
        torch.set_num_threads(2)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(StepThreads, "used_for", noted)
                return propose(self, asked)
        finally:
            assert torch.get_num_threads() == 2
            torch.set_num_threads(1)

    monkeypatch.setattr(DraftModelProposer, "propose", proposed)
    generate(model, {"model": str(model), "num_speculative_tokens": 3}, 2)
    assert set(counts) == {1}


def test_a_draft_model_of_another_vocabulary_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"has a vocabulary of .* a draft model needs the same"):
        LLM(model, device="cpu", speculative_config={"model": str(DEFAULT_MODEL)})


def test_a_draft_model_without_room_for_a_block_is_refused_by_its_own_option(model: Path) -> None:
    with pytest.raises(ConfigError, match="draft_kv_cache_memory of 1000 bytes holds no block"):
        LLM(model, device="cpu", speculative_config={"model": str(model), "draft_kv_cache_memory": 1000})
