"""Steps queued on a device as a whole: their tokens and logprobs are those of steps in turn."""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from deployments import link_text_model
from step_plans import new, outputs, share, tokens
from twin_device import TwinDevice

from pdkv import LLM, SamplingParams
from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.worker.batch import PersistentBatch
from pdkv.engine.worker.drafts import DrawRows
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.engine.worker.kv_cache import allocate_pool, make_layout
from pdkv.engine.worker.masks import GrammarMasks, Masks, StepMasks
from pdkv.engine.worker.pending import MAX_PENDING, DoneStep, PendingStep
from pdkv.engine.worker.queued_step import QueuedStep
from pdkv.engine.worker.ranks.masks import RankMasks, pack
from pdkv.engine.worker.ranks.messages import MasksTaken
from pdkv.engine.worker.runner import ModelRunner
from pdkv.kernels import streams
from pdkv.kernels.streams import HostStreams
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from pdkv.sampling.shape import StructuredOutputs

pytestmark = pytest.mark.processes  # grammars are compiled in one

MAX_LEN, NUM_BLOCKS, MAX_SEQS = 128, 24, 12


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_text_model(tiny_model_dir, tmp_path_factory.mktemp("queued"))


class Ran(NamedTuple):
    plan: StepPlan
    output: StepOutput


class Recording(NamedTuple):
    """What an engine ran in turn."""

    steps: list[Ran]
    masks: list[MasksTaken]  # of the steps in which a request with a grammar draws
    num_preemptions: int


@pytest.fixture(scope="module")
def recording(model: Path) -> Recording:
    """Steps planned ahead: chunks of prompts beside decodes, preemptions, stops and aborts that are found late."""
    rng = random.Random(5)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randrange(1, 60))] for _ in range(30)]
    params = [_params(i, rng) for i in range(len(prompts))]
    steps: list[Ran] = []
    masks: list[MasksTaken] = []
    with pytest.MonkeyPatch.context() as patch:
        launch, take = InProcessExecutor.launch, GrammarMasks.take

        def taken(self: GrammarMasks, drawn: DrawRows, batch: PersistentBatch) -> StepMasks:
            step = take(self, drawn, batch)
            if self.masks_in(drawn.slots):
                masks.append(pack(step))
            return step

        def launched(self: InProcessExecutor, plan: StepPlan) -> PendingStep:
            step = launch(self, plan)
            steps.append(Ran(plan, step.finish()))
            return step

        patch.setattr(InProcessExecutor, "launch", launched)
        patch.setattr(GrammarMasks, "take", taken)
        options: dict[str, Any] = {"max_steps_ahead": 2, "in_turn_below_s": 0.0, "threads": 1, "device": "cpu"}
        sizes: dict[str, Any] = {
            "max_num_seqs": MAX_SEQS,
            "max_model_len": MAX_LEN,
            "kv_cache_memory": _pool_bytes(model),
        }
        with LLM(model, **options, **sizes, max_num_batched_tokens=48) as llm:
            llm.generate(prompts, params, use_tqdm=False)
            return Recording(steps, masks, llm._engine.core.scheduler.num_preemptions)


def _params(i: int, rng: random.Random) -> SamplingParams:
    """Of three requests one is of a kind that needs the tokens before it on the host."""
    look_back: dict[str, Any] = [
        {"bad_words_token_ids": ((7,), (9, 11))}, {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputs(regex="[a-f]{1,20}")},
    ][i // 3 % 3] if i % 3 == 2 and i > 9 else {}  # fmt: skip
    return SamplingParams(
        temperature=(0.0, 0.8, 1.3)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        top_k=(0, 5)[i % 4 == 0],
        max_tokens=3 + 2 * i,
        min_tokens=i % 4,
        seed=i,
        logprobs=(None, 2, 0)[i % 3],
        logit_bias={8: 1.5} if i % 5 == 0 else {},
        repetition_penalty=(1.0, 1.3, 1.0, 0.8)[i % 4],
        frequency_penalty=(0.0, 0.4)[i % 3 == 1],
        presence_penalty=(0.0, -0.2)[i % 7 == 2],
        allowed_token_ids=list(range(4, 40)) if i % 7 == 0 else None,
        stop_token_ids=[rng.randrange(60) for _ in range(3)],
        stop=("K", "J") if i % 4 == 3 else (),
        **look_back,
    )


def _pool_bytes(model: Path) -> int:
    config = load_model_config(model)
    return NUM_BLOCKS * make_layout(config, block_size=16, dtype=config.dtype).block_bytes


def make_runner(model: Path, masks: Masks | None = None) -> ModelRunner:
    torch.set_num_threads(1)
    config = load_model_config(model)
    dtype, cpu = getattr(torch, config.dtype), torch.device("cpu")
    layout = make_layout(config, block_size=16, dtype=config.dtype)
    decoder = load_decoder(model, config, dtype=dtype, device=cpu, max_model_len=MAX_LEN)
    pool = allocate_pool(layout, NUM_BLOCKS, cpu)
    return ModelRunner(decoder, pool, layout, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, masks=masks)


@pytest.fixture
def runner(model: Path, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """Over the twin."""
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    return make_runner(model)


def test_the_recording_has_all_that_can_happen(recording: Recording) -> None:
    assert recording.num_preemptions > 0
    shares = [share for step in recording.steps for share in step.plan.scheduled]
    assert any(not share.samples for share in shares)
    assert any(len({share.num_scheduled for share in step.plan.scheduled}) > 1 for step in recording.steps)


@pytest.mark.parametrize("seed", range(3))
def test_steps_launched_before_the_last_ones_were_read_give_the_same(
    model: Path, monkeypatch: pytest.MonkeyPatch, recording: Recording, seed: int
) -> None:
    """To the bit: the plans are the same, so what is computed together is, too."""
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    masks = iter(recording.masks)
    runner = make_runner(model, RankMasks(lambda: next(masks)))
    rng, pending = random.Random(seed), deque[tuple[PendingStep, StepOutput]]()
    launched: list[type[PendingStep]] = []
    for plan, output in recording.steps:
        while pending and (len(pending) > MAX_PENDING or rng.random() < 0.2):
            step, expected = pending.popleft()
            assert step.finish() == expected
        pending.append((runner.launch(plan), output))
        launched.append(type(pending[-1][0]))
    assert all(step.finish() == expected for step, expected in pending)
    assert min(launched.count(QueuedStep), launched.count(DoneStep)) > 20


PROMPT = list(range(20, 30))


def in_turn(model: Path, run: Callable[[ModelRunner], list[StepOutput]]) -> list[StepOutput]:
    """What a runner gives that computes each step at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "HOST", HostStreams())
        return run(make_runner(model))


def test_a_slot_s_next_request_computes_its_own_prompt_whatever_was_drawn_there(
    model: Path, runner: ModelRunner
) -> None:
    """Neither the device's token nor the one that is read later gets into a prompt that has that position, too."""
    longer = list(range(30, 50))

    def reuse(runner: ModelRunner, first_chunk: int) -> list[StepOutput]:
        return outputs(runner, [
            StepPlan(1, [new("a", PROMPT, 0)], [share("a", 0, 10)], [("b", 0)]),
            StepPlan(2, [new("b", longer, 4)], [share("b", 0, first_chunk, samples=False)], [("a", 0)]),
            StepPlan(3, [], [share("b", first_chunk, 20 - first_chunk)], []),
        ])  # fmt: skip

    for first_chunk in (11, 5):  # ends where a's token is; the next one reads what was written down meanwhile
        run = partial(reuse, first_chunk=first_chunk)
        assert run(runner) == in_turn(model, run)


def test_a_request_without_a_choice_harms_no_step_that_was_launched_behind_it(runner: ModelRunner) -> None:
    stuck = new("a", PROMPT, 0, allowed_token_ids=[7], logit_bias={7: -torch.inf})
    plans = [
        StepPlan(0, [stuck, new("b", PROMPT, 4)], [share("a", 0, 10), share("b", 0, 10)], []),
        StepPlan(1, [], [share("a", 10, 1), share("b", 10, 1)], []),
    ]
    first, second = outputs(runner, plans)
    assert tokens(first, "a") == []
    assert set(first.failed) == {("a", 0)}
    assert "no token can be chosen" in first.failed["a", 0].message
    assert len(tokens(second, "b")) == 1


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 2.0}


def test_steps_with_penalties_are_launched_behind_each_other(model: Path, runner: ModelRunner) -> None:
    plans = [
        StepPlan(
            0, [new("a", PROMPT, 0, **PENALTIES), new("b", PROMPT, 4)], [share("a", 0, 10), share("b", 0, 10)], []
        ),
        *(StepPlan(i, [], [share("a", 9 + i, 1), share("b", 9 + i, 1)], []) for i in range(1, 6)),
    ]
    first, second = runner.launch(plans[0]), runner.launch(plans[1])
    assert isinstance(first, QueuedStep)
    assert isinstance(second, QueuedStep)
    found = [first.finish(), second.finish(), *outputs(runner, plans[2:])]
    assert found == in_turn(model, lambda runner: outputs(runner, plans))
    assert len({token for output in found for token in tokens(output, "a")}) == 6


@pytest.mark.parametrize("penalties", [{}, PENALTIES], ids=["none", "penalties"])
def test_a_token_drawn_again_in_turn_replaces_the_one_on_the_device(
    model: Path, runner: ModelRunner, penalties: dict[str, Any]
) -> None:
    """As where a load has failed: what was computed before counts no more."""

    def redraw(runner: ModelRunner) -> list[StepOutput]:
        first = runner.execute(StepPlan(0, [new("a", PROMPT, 0, **penalties)], [share("a", 0, 10)], []))
        runner._kv_pool.neg_()  # the prompt's last token sees other KV from now on
        looks_back = new("b", PROMPT, 4, bad_words_token_ids=((7,),))
        plans = [
            StepPlan(1, [looks_back], [share("a", 9, 1), share("b", 0, 10)], []),
            StepPlan(2, [], [share("a", 10, 1)], []),
        ]
        return [first, *outputs(runner, plans)]

    expected = in_turn(model, redraw)
    assert tokens(expected[0], "a") != tokens(expected[1], "a")
    assert redraw(runner) == expected
