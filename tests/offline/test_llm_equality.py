"""One engine in this process says what transformers says: every family, in chunks, under preemption, again (F1)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from equality import AMPLE_POOL_BLOCKS, NUM_OUTPUT, SMALL_POOL_BLOCKS, Workload, greedy_workload
from oracle import Oracle, oracle
from small_models import FEATURES

from pdkv import LLM, SamplingParams
from tests.conftest import FAMILIES

CHUNKS = {"max_num_batched_tokens": 48, "max_num_seqs": 48, "long_prefill_token_threshold": 32}

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)

FEWER = ("llama", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:]))
"""Tokens and logprobs of every family, with some tokens cached, are in `tests/engine/worker/test_families.py`."""

NORMED = [pytest.param(name, marks=() if name == "qwen3" else pytest.mark.slow) for name in FAMILIES]
"""Queries and keys are normed, with windows."""


@dataclass(frozen=True)
class Family:
    """A model, its oracle and its prompts."""

    workload: Workload
    oracle: Oracle

    def llm(self, **fields: Any) -> LLM:
        """An engine with a pool for all prompts, unless told otherwise."""
        fields = {"kv_cache_memory": AMPLE_POOL_BLOCKS * self.workload.block_bytes, **fields}
        return LLM(self.workload.path, threads=1, device="cpu", **fields)

    @property
    def small_pool(self) -> dict[str, int]:
        """Fields of an engine that cannot hold all prompts."""
        num_blocks = SMALL_POOL_BLOCKS
        return {"kv_cache_memory": num_blocks * self.workload.block_bytes, "max_model_len": num_blocks * 16}

    def check(self, llm: LLM, params: SamplingParams = GREEDY) -> list[Any]:
        """Complete all prompts at once; returns the outputs, which are right."""
        outputs = llm.generate([e.prompt for e in self.workload.expected], params, use_tqdm=False)
        for output, expected in zip(outputs, self.workload.expected, strict=True):
            assert output.outputs[0].token_ids == expected.output, f"prompt of {len(expected.prompt)} tokens"
        return outputs


@pytest.fixture(scope="module")
def family(
    request: pytest.FixtureRequest,
    hf_model: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    thoroughness: float,
) -> Family:
    if thoroughness < 1 and request.param != FAMILIES[0]:
        pytest.skip("make check takes one family")
    directory = hf_model(request.param, initializer_range=0.2, **FEATURES.get(request.param, {}))
    return Family(greedy_workload(directory, tmp_path_factory.mktemp(request.param)), oracle(directory))


@pytest.mark.parametrize("family", FEWER, indirect=True)
@pytest.mark.parametrize("chunks", [pytest.param({}, marks=pytest.mark.slow), CHUNKS], ids=["whole", "chunked"])
def test_first_pass_and_replay(family: Family, chunks: dict[str, int]) -> None:
    with family.llm(**chunks) as llm:
        first, replay = (family.check(llm) for _ in range(2))
        assert llm._engine.core.scheduler.num_preemptions == 0
    num_cached = [sum(output.num_cached_tokens for output in outputs) for outputs in (first, replay)]
    assert num_cached[1] > num_cached[0]


@pytest.mark.parametrize("family", FEWER, indirect=True)
def test_preemption(family: Family) -> None:
    with family.llm(**family.small_pool) as llm:
        family.check(llm)
        assert llm._engine.core.scheduler.num_preemptions > 0
        num_preemptions = llm._engine.core.scheduler.num_preemptions
        family.check(llm)
        assert llm._engine.core.scheduler.num_preemptions > num_preemptions


@pytest.mark.parametrize("family", FEWER, indirect=True)
def test_bigger_blocks_and_small_batches(family: Family) -> None:
    with family.llm(
        block_size=32,
        max_num_seqs=3,
        max_num_batched_tokens=100,
        kv_cache_memory=AMPLE_POOL_BLOCKS * family.workload.block_bytes,
    ) as llm:
        family.check(llm)


@pytest.mark.parametrize("family", NORMED, indirect=True)
def test_logprobs_in_chunks_and_under_preemption(family: Family) -> None:
    params = msgspec.structs.replace(GREEDY, logprobs=2, prompt_logprobs=0)
    with family.llm(**CHUNKS, **family.small_pool) as llm:
        outputs = family.check(llm, params)
        assert llm._engine.core.scheduler.num_preemptions > 0
    for output, (prompt, continuation) in zip(outputs, family.workload.expected, strict=True):
        tokens = prompt + continuation
        rows = family.oracle.logprobs(tokens)
        shown = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        assert [next(iter(entry)) for entry in shown] == tokens[1:]
        expected = [float(rows[i, token_id]) for i, token_id in enumerate(tokens[1:])]
        assert [entry[i].logprob for i, entry in zip(tokens[1:], shown, strict=True)] == pytest.approx(
            expected, abs=1e-3
        )
        best = rows[len(prompt) - 1 : -1].topk(2)
        for entry, ids, values in zip(
            output.outputs[0].logprobs, best.indices.tolist(), best.values.tolist(), strict=True
        ):
            assert list(entry) == ids
            assert [logprob.logprob for logprob in entry.values()] == pytest.approx(values, abs=1e-3)
