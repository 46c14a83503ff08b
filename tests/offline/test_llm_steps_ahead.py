"""Steps planned ahead, and guesses at what comes, change no output; and the thread of steps ends with the LLM."""

import gc
import random
import threading
import weakref
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
from random_proposer import RandomProposer

from pdkv import LLM, SamplingParams
from pdkv.assemble.engine import build_engine
from pdkv.engine.plan import NewRequest
from pdkv.engine.step_loop import Ahead

NUM_PROMPTS = 18


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
            stop=("K", "J", "!u") if i % 4 == 3 else (),
            bad_words_token_ids=((7,), (9, 11)) if i % 3 == 2 else (),
        )
        for i in range(NUM_PROMPTS)
    ]
    return prompts, params


def watch_steps_ahead(llm: LLM, patch: pytest.MonkeyPatch) -> list[int]:
    """How many steps computed beside each one that was planned; gets longer."""
    watch, seen = llm._engine.core.watch, [0]
    plan = Ahead.plan

    def planned(self: Ahead, now: float) -> bool:
        was_run_here = plan(self, now)
        seen.append(watch.num_computing - 1)
        return was_run_here

    patch.setattr(Ahead, "plan", planned)
    return seen


def generate(model: Path, ahead: int, proposer: RandomProposer | None = None) -> list[Any]:
    """What there is to say of every choice: (prompt, seed, number, token ids, text, reasons, logprobs)."""
    prompts, params = asked()
    pool = {"kv_cache_memory": 20 * 16 * 512, "max_model_len": 128}
    lag = {"max_steps_ahead": ahead, "in_turn_below_s": 0.0}  # 0: steps as short as these are planned ahead, too
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdkv.offline.engine.build_engine", partial(build_engine, proposer=proposer))
        with LLM(model, threads=1, max_num_seqs=12, device="cpu", **lag, **pool) as llm:
            most = watch_steps_ahead(llm, patch)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert llm._engine.core.scheduler.num_preemptions > 0
            assert max(most) == ahead
    found = []
    for output, prompt, asked_for in zip(outputs, prompts, params, strict=True):
        for choice in output.outputs:
            logprobs = [{i: pytest.approx(e[i].logprob, abs=1e-3) for i in e} for e in choice.logprobs or ()]
            reasons = choice.finish_reason, choice.stop_reason
            found.append(
                (tuple(prompt), asked_for.seed, choice.index, choice.token_ids, choice.text, reasons, logprobs)
            )
    return found


@pytest.fixture(scope="module")
def in_turn(model: Path) -> list[Any]:
    return generate(model, 0)


@pytest.mark.parametrize("ahead", [1, 2])
def test_all_parameters_give_what_steps_in_turn_give(model: Path, in_turn: list[Any], ahead: int) -> None:
    reasons = {type(choice[5][1]) for choice in in_turn}
    assert reasons == {NoneType, int, str}  # length, a token, a string
    assert generate(model, ahead) == in_turn


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_guesses_right_and_wrong_change_nothing(model: Path, in_turn: list[Any], ahead: int) -> None:
    foreseen = {choice[:3]: choice[3] for choice in in_turn}

    def foresee(request: NewRequest) -> list[int]:
        return foreseen[tuple(request.prompt_token_ids), request.params.seed, request.choice]

    proposer = RandomProposer(3, foresee, vocab_size=60)
    assert generate(model, ahead, proposer) == in_turn
    assert proposer.num_right > 50
    assert proposer.num_wrong > 50


def test_an_llm_that_nobody_holds_any_more_gives_its_memory_back(model: Path) -> None:
    llm = LLM(model, max_steps_ahead=1, threads=1, device="cpu", kv_cache_memory=1 << 20)
    llm.generate([[7, 8, 9]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    steps = [thread for thread in threading.enumerate() if thread.name == "steps"]
    core = weakref.ref(llm._engine.core)
    assert len(steps) == 1
    del llm
    gc.collect()
    steps[0].join(60.0)
    assert not steps[0].is_alive()
    gc.collect()
    assert core() is None
