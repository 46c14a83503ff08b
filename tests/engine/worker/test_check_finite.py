"""--check-finite: a request for which the model computes NaN or infinity fails alone, and nobody finds its KV."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from oracle import Oracle
from poisoned_model import POISON, VALUES, poison

from pdkv.engine.core import EngineCore
from pdkv.engine.worker.executor import InProcessExecutor
from pdkv.engine.worker.finite_check import finite_rows, usable_rows
from pdkv.engine.worker.sampling.draw import argmax
from pdkv.errors import InvalidRequest, NonFiniteLogits
from pdkv.sampling.params import SamplingParams
from pdkv.testing.engine import InProcessEngine, at_rest, of_type, output_of, run, submit
from pdkv.wire.messages import BlockStored, EngineToRouter, Failed, Tokens

torch.set_num_threads(1)

NUM_OUTPUT = 6
CLEAN = [list(range(5, 45)), [9], list(range(100, 117)), [7, 8] * 30]

MakeEngine = Callable[..., InProcessEngine]


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> list[list[int]]:
    """What transformers says about the clean prompts."""
    oracle = Oracle(tiny_model_dir)
    outputs = [oracle.generate(prompt, NUM_OUTPUT) for prompt in CLEAN]
    assert all(output is not None and POISON not in output for output in outputs)
    return [output for output in outputs if output is not None]


@pytest.fixture(scope="module", params=VALUES.values(), ids=list(VALUES))
def poisoned_model(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    return poison(tiny_model_dir, tmp_path_factory.mktemp("poisoned") / "model", request.param)


@pytest.fixture(scope="module")
def nan_model(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poison(tiny_model_dir, tmp_path_factory.mktemp("nan") / "model", float("nan"))


def in_chunks(num_tokens: int) -> dict[str, int]:
    """Options by which a step computes so many tokens; 0: as many as there are."""
    return {"max_num_batched_tokens": num_tokens, "max_num_seqs": num_tokens} if num_tokens else {}


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    made: list[InProcessEngine] = []

    def make(model: Path, connector: str = "", options: dict[str, str] | None = None, **fields: Any) -> InProcessEngine:
        fields = {"check_finite": True, "kv_cache_memory": 4 << 20, **fields}
        name = f"e{len(made)}"
        made.append(InProcessEngine.of_model(model, connector, options, name=name, epoch=f"{name}.0", **fields))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def send(core: EngineCore, prompts: dict[str, list[int]], now: float = 0.0) -> None:
    for name, prompt in prompts.items():
        core.handle("r", submit(prompt, request_id=name, max_tokens=NUM_OUTPUT), now)


def failed(messages: list[EngineToRouter]) -> set[str]:
    """Who failed; all for the one reason, for good."""
    failures = [message for message in messages if isinstance(message, Failed)]
    assert {(f.code, f.retryable) for f in failures} <= {(NonFiniteLogits.code, False)}
    assert all("--check-finite" in f.message for f in failures)
    return {f.request_id for f in failures}


def check_clean(core: EngineCore, messages: list[EngineToRouter], expected: list[list[int]]) -> None:
    for i, output in enumerate(expected):
        assert output_of(messages, f"clean-{i}") == output
    assert at_rest(core)


def kv_pool(core: EngineCore) -> torch.Tensor:
    assert isinstance(core.executor, InProcessExecutor)
    assert core.executor._runner is not None
    return core.executor._runner._kv_pool


POISONED = {
    "poison-first": [POISON, 5, 6],
    "poison-last": [*range(5, 45), POISON],  # behind a clean prompt
    "poison-early": [*range(200, 216), POISON, *range(200, 280)],  # most of it is computed behind the poison
    "poison-only": [POISON],
}


@pytest.mark.parametrize("chunk", [0, 16], ids=["whole", "chunks"])
def test_only_requests_with_the_poisoned_token_fail(
    poisoned_model: Path, chunk: int, expected: list[list[int]], make_engine: MakeEngine
) -> None:
    """Twice: what the first pass left in the cache and in blocks must not spoil the second one."""
    core = make_engine(poisoned_model, **in_chunks(chunk)).core
    clean = {f"clean-{i}": prompt for i, prompt in enumerate(CLEAN)}
    for attempt in range(2):
        for name, prompt in {**clean, **POISONED}.items():
            core.handle("r", submit(prompt, request_id=name, attempt=attempt, max_tokens=NUM_OUTPUT), 0.0)
        messages = run(core)
        assert failed(messages) == set(POISONED)
        assert not [m for m in of_type(messages, Tokens) if m.request_id in POISONED]
        check_clean(core, messages, expected)
    assert core.reports.make_load().non_finite_requests == 2 * len(POISONED)
    pool, blocks = kv_pool(core), core.scheduler.kv.pool
    cached = [block for block in range(blocks.num_blocks) if blocks.has_content(block)]
    assert cached
    assert pool[cached].isfinite().all()


def test_a_chunk_in_mid_prompt_fails_at_once(nan_model: Path, make_engine: MakeEngine) -> None:
    """It has no logits to look at; the chunks behind it are not computed, and it is not in the cache meanwhile."""
    core = make_engine(nan_model, **in_chunks(16)).core
    send(core, {"poisoned": [POISON, *range(200, 300)]})
    core.step(0.0)
    messages = [message for _, sent in core.take_messages(0.0) for message in sent]
    assert failed(messages) == {"poisoned"}
    assert core.scheduler.kv.pool.counts().cached == 0
    assert at_rest(core)


def test_a_token_that_is_drawn_fails_its_request_then(
    nan_model: Path, expected: list[list[int]], make_engine: MakeEngine
) -> None:
    core = make_engine(nan_model).core
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, logit_bias={POISON: 100.0})
    drawn = msgspec.structs.replace(submit([5, 6, 7], request_id="drawn"), params=params)
    core.handle("r", drawn, 0.0)
    send(core, {"clean-0": CLEAN[0]})
    messages = run(core)
    assert failed(messages) == {"drawn"}
    assert output_of(messages, "drawn") == [POISON]
    check_clean(core, messages, expected[:1])


@pytest.mark.parametrize("layer", [0, 2])
def test_kv_that_went_bad_in_the_cache_is_found_once(
    layer: int, tiny_model_dir: Path, expected: list[list[int]], make_engine: MakeEngine
) -> None:
    """One key of one layer, in the second block of a prompt: its first block stays."""
    core = make_engine(tiny_model_dir).core
    send(core, {"clean-0": CLEAN[0]})
    check_clean(core, run(core), expected[:1])
    blocks = core.scheduler.kv.pool
    stored = blocks.snapshot_events()[-1]
    assert blocks.counts().cached == 2
    assert isinstance(stored, BlockStored)
    second = blocks.lookup(stored.keys[-1])
    assert stored.parent is not None
    kv_pool(core)[second, layer, 1, 0, 3] = float("nan")
    send(core, {"again": CLEAN[0], "clean-1": CLEAN[1]})
    messages = run(core)
    assert failed(messages) == {"again"}
    assert output_of(messages, "clean-1") == expected[1]
    assert blocks.counts().cached == 1
    core.handle("r", submit(CLEAN[0], request_id="clean-0", attempt=1, max_tokens=NUM_OUTPUT), 0.0)
    check_clean(core, run(core), expected[:1])


def test_nothing_of_it_is_saved(nan_model: Path, tmp_path: Path, make_engine: MakeEngine) -> None:
    """A store gets what was computed before the poison, at most."""
    options = {"url": f"file://{tmp_path / 'store'}", "tokens_per_value": "16", "min_hit_tokens": "0"}
    store = ("store", options)
    before, clean = list(range(200, 232)), list(range(5, 45))
    poisoned = [*before, POISON, *clean]
    first = make_engine(nan_model, *store, **in_chunks(16))
    send(first.core, {"poisoned": poisoned, "clean": clean}, first.clock.now())
    assert failed(first.rest()) == {"poisoned"}
    found = {}
    for name, prompt in {"before": [*before, 5], "clean": clean, "poisoned": poisoned}.items():
        engine = make_engine(nan_model, *store)
        core = engine.core
        send(core, {name: prompt}, engine.clock.now())
        messages = engine.rest()
        assert failed(messages) == ({name} if name == "poisoned" else set())
        found[name] = core.counters.store
        cached = [b for b in range(core.card.num_blocks) if core.scheduler.kv.pool.has_content(b)]
        assert kv_pool(core)[cached].isfinite().all()
    assert (found["before"], found["clean"]) == (32, 32)


def test_without_it_the_engine_answers_and_lives(
    nan_model: Path, expected: list[list[int]], make_engine: MakeEngine
) -> None:
    core = make_engine(nan_model, check_finite=False).core
    send(core, {**{f"clean-{i}": prompt for i, prompt in enumerate(CLEAN)}, "poisoned": [POISON, 5, 6]})
    messages = run(core)
    assert failed(messages) == set()
    assert len(output_of(messages, "poisoned")) == NUM_OUTPUT
    check_clean(core, messages, expected)


@pytest.mark.parametrize("chunk", [0, 20])
def test_without_it_a_prefix_is_cached_as_if_nothing_came_behind(
    poisoned_model: Path, expected: list[list[int]], make_engine: MakeEngine, chunk: int
) -> None:
    """What overflows at the end of a prompt is not in the blocks before, which clean prompts find."""
    core = make_engine(poisoned_model, check_finite=False, **in_chunks(chunk)).core
    for number, prompt in enumerate(CLEAN):
        send(core, {f"poisoned-{number}": [*prompt[:-1], POISON, 5, 6]})
        run(core)
    send(core, {f"clean-{i}": prompt for i, prompt in enumerate(CLEAN)})
    check_clean(core, run(core), expected)
    assert core.reports.make_load().sources.local_hit >= 48 + 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows(dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    rows = torch.tensor([[1, 2], [nan, 1], [inf, 1], [-inf, 1], [-inf, -inf], [1, nan]], dtype=dtype)
    assert finite_rows(rows).tolist() == [True, False, False, False, False, False]
    assert usable_rows(rows).tolist() == [True, False, False, True, False, False]
    assert argmax(rows[:1]).tolist() == [1]


def test_parameters_that_forbid_every_token_are_refused(hf_model: Callable[..., Path], make_engine: MakeEngine) -> None:
    """A vocabulary of 32: the stop tokens of min_tokens can be all of it."""
    core = make_engine(hf_model("llama", vocab_size=32), check_finite=False).core
    everything = SamplingParams(temperature=0.0, max_tokens=4, min_tokens=2, stop_token_ids=[0, *range(2, 32)])
    core.handle("r", msgspec.structs.replace(submit([5, 6]), params=everything), 0.0)
    assert not core.requests, "it is known before any step"
    (failure,) = of_type(run(core), Failed)
    assert failure.code == InvalidRequest.code
    assert "min_tokens" in failure.message


def test_parameters_that_leave_no_token_fail_their_request(
    tiny_model_dir: Path, expected: list[list[int]], make_engine: MakeEngine
) -> None:
    """A repetition penalty so small that logits overflow: seen only when it is applied."""
    core = make_engine(tiny_model_dir, check_finite=False).core
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, repetition_penalty=1e-45)
    core.handle("r", msgspec.structs.replace(submit(CLEAN[2], request_id="overflows"), params=params), 0.0)
    send(core, {"clean-0": CLEAN[0]})
    messages = run(core)
    (failure,) = of_type(messages, Failed)
    assert (failure.request_id, failure.code, failure.retryable) == ("overflows", InvalidRequest.code, False)
    assert "no token can be chosen" in failure.message
    assert core.reports.make_load().non_finite_requests == 0
    check_clean(core, messages, expected[:1])
