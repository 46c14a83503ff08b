"""Decode steps from graphs, over Triton's interpreter; tests/kernels/test_triton.py runs it in a process of its own."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from interpreted_floats import save_work
from small_models import make_hf_model
from tape import TapeRecorder
from triton.runtime.interpreter import InterpretedFunction
from twin_device import TwinDevice

from pdkv.engine.plan import StepOutput, StepPlan
from pdkv.engine.worker import step_buffers
from pdkv.engine.worker.attention import cuda as attention_cuda
from pdkv.engine.worker.attention import select
from pdkv.engine.worker.graphs import Replay
from pdkv.engine.worker.pending import MAX_PENDING, PendingStep
from pdkv.engine.worker.step_buffers import Padding
from pdkv.kernels import kv_copy, streams
from pdkv.kernels import paged_attention_triton as attention_kernels
from pdkv.kernels.kv_copy_triton import write_kv_triton
from pdkv.kernels.paged_attention_triton import paged_attention_triton
from pdkv.wire.types import RequestKey
from tests.engine.worker.step_driver import StepDriver

torch.set_num_threads(1)
save_work()

SIZES = (1, 3, 6)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Norms of queries and keys, and layers with and without a window."""
    features: dict[str, Any] = {
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": 20,
    }
    features["layer_types"] = ["sliding_attention", "full_attention"]
    return make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", "float32", initializer_range=0.2, **features)


@pytest.fixture(autouse=True, scope="module")
def _in_triton() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "on_device", lambda _: True)
        patch.setattr(attention_cuda, "paged_attention", paged_attention_triton)
        patch.setattr(kv_copy, "write_kv", write_kv_triton)
        patch.setattr(attention_kernels, "_PROGRAMS", 4)  # those without work cost the interpreter as much as others
        yield


class Driver(StepDriver):
    """Takes notes of steps and logits; the pool is full of NaN where nobody has computed anything."""

    def __init__(self, model_dir: Path, max_num_tokens: int = 0, **options: Any) -> None:
        defaults: dict[str, Any] = {"num_blocks": 40, "max_num_seqs": 6, "linears": "torch", "check_finite": False}
        super().__init__(model_dir, **{**defaults, **options})
        if max_num_tokens:
            self.runner.warm_up(max_num_tokens)
        else:
            self.runner.warm_up_decodes(options.get("recorder"))
        self.pool.fill_(torch.nan)
        self.steps: list[tuple[StepPlan, StepOutput]] = []
        self.logits: list[torch.Tensor] = []
        execute, compute = self.runner.execute, self.model.logits

        def executed(plan: StepPlan) -> StepOutput:
            self.steps.append((plan, execute(plan)))
            return self.steps[-1][1]

        def noted(hidden: torch.Tensor) -> torch.Tensor:
            self.logits.append(compute(hidden))
            return self.logits[-1]

        self.runner.execute = executed  # type: ignore[method-assign]
        self.model.logits = noted  # type: ignore[method-assign]

    def end(self, key: RequestKey) -> None:
        self.pool[self.tables[key]] = torch.nan
        super().end(key)


def play(
    driver: StepDriver,
    seed: int,
    after_step: Callable[[dict[RequestKey, int]], None] = lambda chunks: None,
    num_steps: int = 7,
) -> dict[RequestKey, list[int]]:
    """Requests come and go; steps are of one request and of many, of prompts, of decodes and of both."""
    draw = random.Random(seed)
    outputs: dict[RequestKey, list[int]] = {}
    live: dict[RequestKey, int] = {}  # length at which it ends
    for index in range(num_steps):
        for name in range(5 if not index else index % 4 == 3):
            length = draw.choice([1, 3, 17])
            key = driver.add(f"{index}.{name}", [draw.randrange(384) for _ in range(length)])
            live[key] = length + draw.randrange(2, 8)
        chunks = {key: min(len(driver.tokens[key]) - driver.computed[key], 15) for key in live}
        if draw.random() < 0.2 and len(chunks) > 1:
            del chunks[next(iter(chunks))]
        driver.step(chunks)
        after_step(chunks)
        for key in [key for key, stop in live.items() if len(driver.tokens[key]) >= stop]:
            outputs[key] = driver.tokens[key]
            del live[key]
            driver.end(key)
    return outputs


def logits_are_equal(one: Driver, other: Driver) -> bool:
    return len(one.logits) == len(other.logits) and all(map(torch.equal, one.logits, other.logits))


class Eager(NamedTuple):
    """What a driver that launches kernel by kernel made, in turn."""

    driver: Driver
    outputs: dict[RequestKey, list[int]]


@pytest.fixture(scope="module")
def eager(model_dir: Path) -> Eager:
    driver = Driver(model_dir, decode_sizes=SIZES)
    return Eager(driver, play(driver, 1))


def test_a_replay_is_its_step_to_the_bit(model_dir: Path, eager: Eager) -> None:
    """And tokens are those of steps that nobody pads."""
    recorder = TapeRecorder()
    replayed, plain = Driver(model_dir, decode_sizes=SIZES, recorder=recorder), Driver(model_dir)
    assert play(replayed, 1) == eager.outputs
    assert recorder.num_replays > 2
    assert len(recorder.sizes) == len(SIZES), "every size is captured once"
    assert len(set(recorder.sizes)) == 1, "and alike"
    assert logits_are_equal(replayed, eager.driver)
    assert torch.equal(replayed.pool.view(torch.int32), eager.driver.pool.view(torch.int32))
    assert play(plain, 1) == eager.outputs
    assert sum(map(len, eager.driver.logits)) > sum(map(len, plain.logits))  # some were padded
    assert len(eager.outputs) > 3


PROMPTS = Padding(40, 0, 3, 3), Padding(40, 6, 3, 9)


@pytest.mark.parametrize("prompts", [pytest.param((), marks=pytest.mark.slow), PROMPTS], ids=["decodes", "prompts"])
def test_a_replay_behind_steps_that_nobody_has_read_yet_is_that_step(
    prompts: Sequence[Padding], model_dir: Path, eager: Eager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plans, by a runner whose tokens stay on its device; with prompts but for rounding."""
    monkeypatch.setattr(streams, "HOST", TwinDevice())
    recorder = TapeRecorder()
    queued = Driver(model_dir, decode_sizes=SIZES, prompt_sizes=prompts, recorder=recorder)
    pending, found = list[PendingStep](), list[StepOutput]()
    for plan, _ in eager.driver.steps:
        pending.append(queued.runner.launch(plan))
        if len(pending) > MAX_PENDING:
            assert not pending[0].is_done
            found.append(pending.pop(0).finish())
    assert [*found, *(step.finish() for step in pending)] == [output for _, output in eager.driver.steps]
    assert recorder.num_replays > 2
    assert (recorder.num_replays > num_decode_steps(eager.driver)) == bool(prompts)
    assert prompts or logits_are_equal(queued, eager.driver)


def num_decode_steps(driver: Driver) -> int:
    return sum(all(each.num_scheduled == 1 for each in plan.scheduled) for plan, _ in driver.steps)


def test_steps_with_prompts_whose_capture_fails_are_launched_one_by_one(
    model_dir: Path, eager: Eager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of decodes and of larger prompts are replayed; tokens are the same."""
    caplog.set_level("INFO")
    recorder = TapeRecorder()
    capture = recorder.capture

    def may_fail(run: Callable[[], None]) -> Replay:
        if len(recorder.sizes) == len(SIZES) + 1:
            raise RuntimeError("no memory for a graph")
        return capture(run)

    monkeypatch.setattr(recorder, "capture", may_fail)
    replayed = Driver(model_dir, decode_sizes=SIZES, prompt_sizes=PROMPTS, recorder=recorder)
    assert play(replayed, 1) == eager.outputs
    assert recorder.num_replays > num_decode_steps(replayed)
    assert "no memory for a graph" in caplog.text
    assert "3 of decode steps, 1 of steps with prompts" in caplog.text


def test_requests_of_few_tokens_are_launched_apart_from_prompts_whichever_the_plan_names_first(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(model_dir, decode_sizes=(1,))
    few = driver.add("few", [3, 4, 5])
    driver.step({few: 3})
    launches: list[tuple[int, int]] = []
    make = attention_kernels._Launch.of

    def note(*arguments: Any) -> Any:
        launch = make(*arguments)
        launches.append((launch.num_seqs, launch.num_tokens))
        return launch

    monkeypatch.setattr(attention_kernels._Launch, "of", note)
    driver.step({driver.add("prompt", [7] * 12): 12, few: 1})
    assert launches == driver.model.config.num_layers * [(1, 1), (1, 12)]


def play_watched(model_dir: Path, **options: Any) -> None:
    """Nothing but the slots of each step's tokens is written."""
    driver = Driver(model_dir, **options)
    before = driver.pool.clone()

    def look(chunks: dict[RequestKey, int]) -> None:
        for key, count in chunks.items():
            for position in range(driver.computed[key] - count, driver.computed[key]):
                at = driver.tables[key][position // 16], slice(None), slice(None), slice(None), position % 16
                assert driver.pool[at].isfinite().all()
                before[at] = driver.pool[at]
        assert torch.equal(driver.pool.view(torch.int32), before.view(torch.int32))
        before.copy_(driver.pool)

    end = driver.end

    def end_and_forget(key: RequestKey) -> None:
        end(key)
        before.copy_(driver.pool)

    driver.end = end_and_forget  # type: ignore[method-assign]
    play(driver, 3, look)


def test_padding_writes_nothing(model_dir: Path) -> None:
    play_watched(model_dir, decode_sizes=SIZES, recorder=TapeRecorder())


def test_padding_with_a_slot_would_be_seen(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_buffers, "_NO_SLOT", 0)
    with pytest.raises(AssertionError):
        play_watched(model_dir, decode_sizes=SIZES[-1:], recorder=TapeRecorder())


def test_who_looks_on_between_layers_is_not_replayed(model_dir: Path) -> None:
    recorder = TapeRecorder()
    driver = Driver(model_dir, decode_sizes=SIZES[-1:], recorder=recorder, check_finite=True)
    play(driver, 1, num_steps=4)
    assert recorder.num_replays == 0 < num_decode_steps(driver)


def variant(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for: constants and options by value, 1, multiples of 16 and 64 bits by that."""
    plain = kernel.kwargs.get("do_not_specialize") or []

    def kind(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if isinstance(value, int):
            width = "i32" if -(2**31) <= value < 2**31 else "i64"
            return width if name in plain else (width, value == 1, value % 16 == 0)
        return type(value)

    return (kernel.__name__, *map(kind, kernel.arg_names, args), *sorted(kwargs.items()))


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Those that were launched, without being run."""
    launched = set()

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.add(variant(kernel, args, kwargs))

    monkeypatch.setattr(InterpretedFunction, "run", note)
    return launched


def test_nothing_is_compiled_behind_the_warm_up(
    tmp_path: Path, variants: set[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float16, which has tiles of both sizes; KV in parts and whole; many requests and one, of any length."""
    monkeypatch.setattr(attention_kernels, "_PROGRAMS", 512)
    features: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "hidden_size": 48}
    directory = make_hf_model(tmp_path, "mistral", "float16", **features, sliding_window=30, num_hidden_layers=1)
    driver = Driver(directory, max_num_tokens=50, num_blocks=150, max_num_seqs=8, decode_sizes=SIZES)
    driver.pool.zero_()
    warm = set(variants)
    assert len([v for v in warm if v[0] == "_paged_attention_kernel"]) == 4
    play(driver, 4)
    for length in (700, 513, 470):
        key = driver.add(str(length), [7] * length)
        driver.computed[key] = length - 37  # of zeros
        beside = driver.add(f"{length}+", [7] * 3)
        for chunks in ({key: 33, beside: 3}, {key: 1}, {key: 3, beside: 1}, {key: 1, beside: 1}, {key: 1}):
            driver.step(chunks)
        driver.end(key)
        driver.end(beside)
        driver.pool.zero_()
    assert not variants - warm
