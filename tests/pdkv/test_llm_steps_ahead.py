"""Steps planned ahead change no output, whatever is asked for; and their thread ends with the LLM."""

import gc
import random
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from deployments import link_text_model

from pdkv import LLM, SamplingParams

NUM_PROMPTS = 18


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_text_model(tiny_model_dir, tmp_path_factory.mktemp("steps-ahead"))


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and parameters that need the last token at each draw, or that end requests in all ways."""
    rng = random.Random(3)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randrange(1, 40))] for _ in range(NUM_PROMPTS)]
    params = [
        SamplingParams(
            temperature=(0.0, 0.8, 1.3)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            max_tokens=3 + 2 * i,
            min_tokens=i % 4,
            seed=i,
            n=1 + (i % 5 == 1),
            repetition_penalty=(1.0, 1.3)[i % 2],
            presence_penalty=(0.0, 0.5)[i % 3 == 0],
            logprobs=(None, 2)[i % 4 == 0],
            prompt_logprobs=(None, 1)[i % 6 == 0],
            stop_token_ids=[rng.randrange(60) for _ in range(6)],
        )
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


def generate(model: Path, ahead: int) -> list[Any]:
    prompts, params = asked()
    pool = {"kv_cache_memory": 24 * 16 * 512, "max_model_len": 128}
    with LLM(model, max_steps_ahead=ahead, threads=1, max_num_seqs=12, device="cpu", **pool) as llm:
        outputs = llm.generate(prompts, params, progress=False)
        assert llm._core.scheduler.num_preemptions > 0
    found = []
    for output in outputs:
        for choice in output.outputs:
            logprobs = [(entry.token_id, pytest.approx(entry.logprob, abs=1e-3)) for entry in choice.logprobs or ()]
            found.append((choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, logprobs))
    return found


def test_all_parameters_give_what_steps_in_turn_give(model: Path) -> None:
    in_turn = generate(model, 0)
    assert {choice[2] for choice in in_turn} == {"stop", "length"}
    for ahead in (1, 2):
        for one, other in zip(in_turn, generate(model, ahead), strict=True):
            assert one == other


def test_an_llm_that_nobody_holds_any_more_gives_its_memory_back(model: Path) -> None:
    llm = LLM(model, max_steps_ahead=1, threads=1, device="cpu", kv_cache_memory=1 << 20)
    llm.generate([[7, 8, 9]], SamplingParams(max_tokens=2, ignore_eos=True), progress=False)
    steps = [thread for thread in threading.enumerate() if thread.name == "steps"]
    core = weakref.ref(llm._core)
    assert len(steps) == 1
    del llm
    gc.collect()
    steps[0].join(60.0)
    assert not steps[0].is_alive()
    gc.collect()
    assert core() is None
