"""What the host waits for in steps on a device: for one event, and for nothing without a deadline."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from no_sync import CUDA, DeviceTensors
from processors import Faulty
from recorded_streams import RecordedStreams, check_every_call, use_recorded
from step_plans import new, outputs, share, tokens
from tape import TapeRecorder
from twin_device import TwinDevice

from pdkv.connectors.base import TransferKey, TransferOutcome, TransferResults
from pdkv.engine.plan import StepPlan
from pdkv.engine.worker.attention import select
from pdkv.engine.worker.attention.cuda import CudaAttention
from pdkv.engine.worker.pending import PendingStep
from pdkv.engine.worker.runner import ModelRunner
from pdkv.engine.worker.sampling import logprobs, sampler
from pdkv.errors import RankTimeout
from pdkv.kernels import streams
from pdkv.proposers import TokenProposer
from pdkv.sampling.logits_processors import ModelInfo, ProcessorSet
from pdkv.testing import VirtualClock
from pdkv.wire.kv import KVLayout

MAX_LEN, NUM_BLOCKS = 128, 24
CPU = torch.device("cpu")
VOCAB = 50


class NeverAsked(TokenProposer):
    """A proposer that no step asks for guesses."""

    def guess(self, *_: Any) -> list[int]:
        raise AssertionError("it was asked")


class Chain:
    """A model whose next token is a function of the last one and its position, by torch's operations alone."""

    num_heads, dtype = 1, torch.int64
    config = SimpleNamespace(
        num_layers=1, windows=None, vocab_size=VOCAB, hidden_size=1, eos_token_ids=[], latent=None,
        attention_scale=1.0, attention_softcap=0.0,
    )  # fmt: skip

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


def chain_runner(device: torch.device = CPU, make: type[Chain] = Chain, **options: Any) -> ModelRunner:
    layout = KVLayout(1, 1, 8, 16, "float32", 4)
    pool = torch.zeros(NUM_BLOCKS, 1, 2, 1, 16, 8, device=device)
    model: Any = make(device)
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


class Writing(Chain):
    """Writes as layers write KV."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.kv = torch.zeros(4, device=device)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any, rows: torch.Tensor | None) -> Any:
        self.kv.add_(1.0)
        return super().forward(token_ids, positions, attend, rows)


@pytest.mark.parametrize("in_turn", [False, True])
def test_when_an_output_is_known_the_device_has_computed_the_step_even_if_it_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    """What is confirmed is published, and peers read it: nobody can tell them of this device's events."""
    use_device_s_operations(monkeypatch)
    proposer = NeverAsked()  # with one, steps are computed in turn; it is not asked where nothing is drawn

    def scenario(device: RecordedStreams) -> bool:
        runner = chain_runner(make=Writing, proposer=proposer if in_turn else None)
        model: Any = runner._model
        with device.compute.on(), torch.inference_mode():
            runner.execute(StepPlan(0, [new("a", [3] * 20, 0)], [share("a", 0, 10, samples=False)], []))
        return bool((model.kv == 1.0).all())

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


def test_so_it_is_where_guessing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step's rows begin where the host's tokens end: with one unread, they would lie a place too early."""
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    assert run_chain(chain_runner(proposer=NeverAsked()), keeps_up=False) == EXPECTED


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


class Spoiled(Chain):
    """Its layer looks at numbers, which are not finite for token 9."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Any, rows: torch.Tensor | None) -> Any:
        numbers = torch.where(token_ids == 9, torch.nan, 1.0)
        attend(0, numbers.view(-1, 1, 1).expand(-1, 3, 8), None)
        return super().forward(token_ids, positions, attend, rows)


def test_what_the_host_looks_at_within_a_step_it_awaits_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs of prompts, soundness of what logits processors do, NaN and infinity: by no copy that blocks."""
    monkeypatch.setattr(streams, "_cuda_streams", lambda device: PinnedTwin())
    monkeypatch.setattr(CudaAttention, "attend", lambda *_: None)
    processors = ProcessorSet({"faulty": Faulty}, ModelInfo(VOCAB, (), Path()))
    faulty = {"logits_processors": {"faulty": {"how": "allow"}}, "logit_bias": {7: -torch.inf}}
    with DeviceTensors():
        assert run_chain(chain_runner(CUDA), keeps_up=False, prompt_logprobs=1) == EXPECTED
        runner = chain_runner(CUDA, processors=processors)
        assert run_chain(runner, keeps_up=False, **faulty)[1] == [0] * (NUM_STEPS - 2)
        runner = chain_runner(CUDA, Spoiled, check_finite=True)
        runner._kv_pool[1] = torch.nan
        requests = [new("a", [3, 4] * 10, 0, prompt_logprobs=0), new("b", [9] * 20, 1)]
        output = runner.execute(StepPlan(0, requests, [share("a", 0, 20), share("b", 0, 20)], []))
        assert {key: failure.bad_blocks for key, failure in output.failed.items()} == {("b", 0): [1]}


def test_a_device_that_hangs_is_an_error_with_a_type(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock) -> None:
    use_device_s_operations(monkeypatch)
    device = use_recorded(monkeypatch)
    with device.compute.on(), torch.inference_mode():
        runner = chain_runner(timeout_s=10.0, clock=clock)
        device.compute.hold()
        step = runner.launch(StepPlan(0, [new("a", [3, 4], 0)], [share("a", 0, 2)], []))
        assert not step.is_done
        clock.advance(10.5)
        with pytest.raises(RankTimeout, match="not computed a step within 10 s"):
            step.finish()
        with pytest.raises(RankTimeout, match="not computed"):
            _ = step.is_done
        device.compute.release()
        assert tokens(step.finish(), "a") == Chain.output([3, 4], 1)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(0.0)


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch, clock: VirtualClock) -> list[PendingStep]:
    """Launched at 0, one behind the other; each may take 10 s."""
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    runner = chain_runner(timeout_s=10.0, clock=clock)
    requests = [new(name, [3, 4], 4 * i) for i, name in enumerate("ab")]
    return [runner.launch(StepPlan(i, [r], [share(r.key[0], 0, 2)], [])) for i, r in enumerate(requests)]


def test_a_step_has_as_long_as_each_one_before_it(two_steps: list[PendingStep], clock: VirtualClock) -> None:
    clock.advance(19.0 - clock.now())
    assert not two_steps[1].is_done
    with pytest.raises(RankTimeout, match="within 10 s"):
        _ = two_steps[0].is_done
    clock.advance(21.0 - clock.now())
    with pytest.raises(RankTimeout, match="within 10 s"):
        _ = two_steps[1].is_done


def test_its_time_begins_with_the_end_of_the_one_before(two_steps: list[PendingStep], clock: VirtualClock) -> None:
    clock.advance(2.0 - clock.now())
    two_steps[0].finish()
    clock.advance(11.0 - clock.now())
    assert not two_steps[1].is_done
    clock.advance(13.0 - clock.now())
    with pytest.raises(RankTimeout, match="within 10 s"):
        _ = two_steps[1].is_done


def test_loads_that_a_launch_found_ended_can_be_taken_out_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    found = TransferResults(
        {TransferKey("sent", 0): TransferOutcome()}, {}, {TransferKey("loaded", 0): TransferOutcome()}, {}
    )
    worker: Any = SimpleNamespace(get_finished=lambda: found, get_stats=dict)
    runner = chain_runner(worker=worker)
    step = runner.launch(StepPlan(0, [new("a", [3, 4], 0)], [share("a", 0, 2)], []))
    assert step.has_sends
    assert step.take_loads() == found._replace(finished_sending={})
    assert not step.take_loads()
    assert step.finish().transfers == found._replace(finished_receiving={})
