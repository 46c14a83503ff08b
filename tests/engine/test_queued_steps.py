"""Steps queued on a device as a whole: their tokens and logprobs are those of steps in turn, and none is read early."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from deployments import link_text_model
from no_sync import CUDA, DeviceTensors
from recorded_streams import RecordedStreams, check_every_call, use_recorded
from tape import TapeRecorder
from twin_device import TwinDevice

from pdkv import LLM, SamplingParams
from pdkv.engine.attention import select
from pdkv.engine.executor import InProcessExecutor
from pdkv.engine.kv_cache import allocate_pool, make_layout
from pdkv.engine.pending import DoneStep, PendingStep
from pdkv.engine.plan import NewRequest, ScheduledRequest, StepOutput, StepPlan
from pdkv.engine.queued_step import QueuedStep
from pdkv.engine.runner import ModelRunner
from pdkv.engine.sampling import logprobs, sampler
from pdkv.errors import RankTimeout
from pdkv.grammar.spec import StructuredOutputs
from pdkv.kernels import streams
from pdkv.kernels.streams import HostStreams
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from pdkv.wire.messages import KVLayout

MAX_LEN, NUM_BLOCKS, MAX_SEQS = 128, 24, 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return link_text_model(tiny_model_dir, tmp_path_factory.mktemp("queued"))


class Ran(NamedTuple):
    plan: StepPlan
    output: StepOutput


class Recording(NamedTuple):
    """What an engine ran in turn."""

    steps: list[Ran]
    num_preemptions: int


@pytest.fixture(scope="module")
def recording(model: Path) -> Recording:
    """Steps planned ahead: chunks of prompts beside decodes, preemptions, stops and aborts that are found late."""
    rng = random.Random(5)
    prompts = [[rng.randrange(5, 60) for _ in range(rng.randrange(1, 60))] for _ in range(30)]
    params = [_params(i, rng) for i in range(len(prompts))]
    steps: list[Ran] = []
    with pytest.MonkeyPatch.context() as patch:
        launch = InProcessExecutor.launch

        def launched(self: InProcessExecutor, plan: StepPlan) -> PendingStep:
            step = launch(self, plan)
            steps.append(Ran(plan, step.finish()))
            return step

        patch.setattr(InProcessExecutor, "launch", launched)
        options: dict[str, Any] = {"max_steps_ahead": 2, "in_turn_below_s": 0.0, "threads": 1, "device": "cpu"}
        sizes: dict[str, Any] = {
            "max_num_seqs": MAX_SEQS,
            "max_model_len": MAX_LEN,
            "kv_cache_memory": _pool_bytes(model),
        }
        with LLM(model, **options, **sizes, max_num_batched_tokens=48) as llm:
            llm.generate(prompts, params, progress=False)
            return Recording(steps, llm._engine.core.scheduler.num_preemptions)


def _params(i: int, rng: random.Random) -> SamplingParams:
    """Of three requests one is of a kind that needs the tokens before it on the host."""
    look_back: dict[str, Any] = [
        {"repetition_penalty": 1.3}, {"bad_words_token_ids": ((7,), (9, 11))}, {"prompt_logprobs": 1},
        {"structured_outputs": StructuredOutputs(regex="[a-f]{1,20}")},
    ][i // 3 % 4] if i % 3 == 2 and i > 9 else {}  # fmt: skip
    return SamplingParams(
        temperature=(0.0, 0.8, 1.3)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        top_k=(0, 5)[i % 4 == 0],
        max_tokens=3 + 2 * i,
        min_tokens=i % 4,
        seed=i,
        logprobs=(None, 2, 0)[i % 3],
        logit_bias={8: 1.5} if i % 5 == 0 else {},
        allowed_token_ids=list(range(4, 40)) if i % 7 == 0 else None,
        stop_token_ids=[rng.randrange(60) for _ in range(3)],
        stop=("K", "J") if i % 4 == 3 else (),
        **look_back,
    )


def _pool_bytes(model: Path) -> int:
    config = load_model_config(model)
    return NUM_BLOCKS * make_layout(config, block_size=16, dtype=config.dtype).block_bytes


def make_runner(model: Path) -> ModelRunner:
    torch.set_num_threads(1)
    config = load_model_config(model)
    dtype, cpu = getattr(torch, config.dtype), torch.device("cpu")
    layout = make_layout(config, block_size=16, dtype=config.dtype)
    decoder = load_decoder(model, config, dtype=dtype, device=cpu, max_model_len=MAX_LEN)
    pool = allocate_pool(layout, NUM_BLOCKS, cpu)
    return ModelRunner(decoder, pool, layout, max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN)


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
def test_steps_launched_before_the_last_one_was_read_give_the_same(
    runner: ModelRunner, recording: Recording, seed: int
) -> None:
    """To the bit: the plans are the same, so what is computed together is, too."""
    rng, pending = random.Random(seed), None
    launched: list[type[PendingStep]] = []
    for number, (plan, _) in enumerate(recording.steps):
        if pending is not None and rng.random() < 0.2:
            assert pending.finish() == recording.steps[number - 1].output
        step = runner.launch(plan)
        launched.append(type(step))
        if pending is not None:
            assert pending.finish() == recording.steps[number - 1].output
        pending = step
    assert pending is not None
    assert pending.finish() == recording.steps[-1].output
    assert min(launched.count(QueuedStep), launched.count(DoneStep)) > 20


# --- by hand -------------------------------------------------------------------------------------------------------


def new(name: str, prompt: list[int], first_block: int, **fields: Any) -> NewRequest:
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "logprobs": 3, **fields})
    return NewRequest((name, 0), 0, prompt, [], params, [list(range(first_block, first_block + 4))])


def share(name: str, start: int, count: int, *, samples: bool = True) -> ScheduledRequest:
    return ScheduledRequest((name, 0), start, count, [], samples)


def outputs(runner: ModelRunner, plans: list[StepPlan]) -> list[StepOutput]:
    """Each step is launched before the one in front of it is read."""
    found, pending = list[StepOutput](), None
    for plan in plans:
        step = runner.launch(plan)
        found += [] if pending is None else [pending.finish()]
        pending = step
    return found if pending is None else [*found, pending.finish()]


def tokens(output: StepOutput, name: str) -> list[int]:
    return output.sampled[name, 0].token_ids


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


def test_a_token_drawn_again_in_turn_replaces_the_one_on_the_device(model: Path, runner: ModelRunner) -> None:
    """As where a load has failed: what was computed before counts no more."""

    def redraw(runner: ModelRunner) -> list[StepOutput]:
        first = runner.execute(StepPlan(0, [new("a", PROMPT, 0)], [share("a", 0, 10)], []))
        runner._kv_pool.neg_()  # the prompt's last token sees other KV from now on
        looks_back = new("b", PROMPT, 4, repetition_penalty=1.5)
        plans = [
            StepPlan(1, [looks_back], [share("a", 9, 1), share("b", 0, 10)], []),
            StepPlan(2, [], [share("a", 10, 1)], []),
        ]
        return [first, *outputs(runner, plans)]

    expected = in_turn(model, redraw)
    assert tokens(expected[0], "a") != tokens(expected[1], "a")
    assert redraw(runner) == expected


# --- what the host waits for ---------------------------------------------------------------------------------------

VOCAB = 50


class Chain:
    """A model whose next token is a function of the last one and its position, by torch's operations alone."""

    num_heads, dtype = 1, torch.int64
    config = SimpleNamespace(num_layers=1, windows=None, vocab_size=VOCAB, hidden_size=1, eos_token_ids=[])

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any, rows: torch.Tensor | None) -> Any:
        hidden = ((token_ids * 7 + positions * 3 + 1) % VOCAB).unsqueeze(1)
        return hidden if rows is None else hidden.index_select(0, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (torch.arange(VOCAB, device=self.device) == hidden).float()

    @staticmethod
    def output(prompt: list[int], count: int) -> list[int]:
        known = list(prompt)
        for position in range(len(prompt) - 1, len(prompt) + count - 1):
            known.append((known[-1] * 7 + position * 3 + 1) % VOCAB)
        return known[len(prompt) :]


def chain_runner(device: torch.device = CPU, **options: Any) -> ModelRunner:
    layout = KVLayout(1, 1, 8, 16, "float32", 4)
    pool = torch.zeros(NUM_BLOCKS, 1, 2, 1, 16, 8, device=device)
    model: Any = Chain(device)
    return ModelRunner(model, pool, layout, max_num_seqs=4, max_model_len=MAX_LEN, **options)


NUM_STEPS = 6


def run_chain(runner: ModelRunner, *, keeps_up: bool, **fields: Any) -> list[list[int]]:
    """What two requests draw, the second of which joins in step 2; and what logprobs say is the first one's likeliest.

    `keeps_up`: each step is read before the next is launched. `fields`: of the second one's parameters.
    """
    first, second = new("a", [3, 4], 0), new("b", [9, 5], 4, logprobs=None, **fields)
    plans = [
        StepPlan(0, [first], [share("a", 0, 2)], []),
        StepPlan(1, [], [share("a", 2, 1)], []),
        StepPlan(2, [second], [share("a", 3, 1), share("b", 0, 2)], []),
        *(StepPlan(i, [], [share("a", 1 + i, 1), share("b", i - 1, 1)], []) for i in range(3, NUM_STEPS)),
    ]
    found = [runner.execute(plan) for plan in plans] if keeps_up else outputs(runner, plans)
    likeliest = [entry.top[0][0] for output in found for entry in output.sampled["a", 0].logprobs or ()]
    return [
        [token for output in found for token in tokens(output, "a")],
        [token for output in found[2:] for token in tokens(output, "b")],
        likeliest,
    ]


EXPECTED = [Chain.output([3, 4], NUM_STEPS), Chain.output([9, 5], NUM_STEPS - 2), Chain.output([3, 4], NUM_STEPS)]


def use_device_s_operations(patch: pytest.MonkeyPatch) -> None:
    """Numpy's are quicker on a CPU, and read what they are given at once."""
    patch.setattr(sampler, "argmax", lambda logits: logits.argmax(dim=-1))
    patch.setattr(logprobs, "largest", lambda values, count: values.topk(count, dim=-1).values)


def num_waits(device: RecordedStreams) -> int:
    """Of the host."""
    return device.num_syncs + sum(call.kind == "synchronize" for call in device.calls)


@pytest.mark.parametrize("keeps_up", [False, True])
def test_a_step_is_one_wait_and_nothing_is_read_before_it(monkeypatch: pytest.MonkeyPatch, keeps_up: bool) -> None:
    """Without any one of these records and waits the host reads what is not there yet."""
    use_device_s_operations(monkeypatch)

    def scenario(device: RecordedStreams) -> bool:
        with device.compute.on(), torch.inference_mode():
            found = run_chain(chain_runner(), keeps_up=keeps_up)
        assert num_waits(device) == NUM_STEPS
        return found == EXPECTED

    check_every_call(scenario)


def test_so_it_is_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request looks at the tokens before: its step is over when it is launched, the next one is not."""
    use_device_s_operations(monkeypatch)
    never_drawn = next(token for token in range(VOCAB) if not any(token in drawn for drawn in EXPECTED))

    def scenario(device: RecordedStreams) -> bool:
        with device.compute.on(), torch.inference_mode():
            found = run_chain(chain_runner(), keeps_up=False, bad_words_token_ids=((never_drawn,),))
        assert num_waits(device) == NUM_STEPS
        return found == EXPECTED

    check_every_call(scenario)


@pytest.mark.parametrize("keeps_up", [False, True])
def test_so_it_is_with_graphs(monkeypatch: pytest.MonkeyPatch, keeps_up: bool) -> None:
    """Replays read inputs at one place, and write hidden states to one place, which each step overwrites."""
    use_device_s_operations(monkeypatch)
    monkeypatch.setattr(select, "on_device", lambda _: True)

    def scenario(device: RecordedStreams) -> bool:
        recorder = TapeRecorder()
        with device.compute.on(), torch.inference_mode():
            runner = chain_runner(decode_sizes=(1, 4))
            runner.warm_up_decodes(recorder)
            assert num_waits(device) == 0
            found = run_chain(runner, keeps_up=keeps_up)
        assert recorder.num_replays == NUM_STEPS - 2  # but for those with prompts
        assert num_waits(device) == NUM_STEPS
        return found == EXPECTED

    check_every_call(scenario, but=[("record", "StepBuffers.load")])  # of hosts further ahead: test_step_buffers.py


class PinnedTwin(TwinDevice):
    """Of tensors that say they are on a GPU."""

    def make_pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)


def test_nothing_that_a_launch_calls_makes_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy that blocks, and no look at what is on the device: for the tensors of a GPU each would be an error."""
    monkeypatch.setattr(streams, "_cuda_streams", lambda device: PinnedTwin())
    with DeviceTensors():
        runner = chain_runner(CUDA, decode_sizes=(1, 4))
        runner.warm_up_decodes(None)
        assert run_chain(runner, keeps_up=False) == EXPECTED


def test_a_device_that_hangs_is_an_error_with_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_s_operations(monkeypatch)
    device = use_recorded(monkeypatch)
    with device.compute.on(), torch.inference_mode():
        runner = chain_runner(timeout_s=0.05)
        device.compute.hold()
        step = runner.launch(StepPlan(0, [new("a", [3, 4], 0)], [share("a", 0, 2)], []))
        assert not step.is_done
        with pytest.raises(RankTimeout, match=r"not computed a step within 0\.05 s"):
            step.finish()
        with pytest.raises(RankTimeout, match="not computed"):
            _ = step.is_done
        device.compute.release()
        assert tokens(step.finish(), "a") == Chain.output([3, 4], 1)
