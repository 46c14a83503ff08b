"""What is computed again, behind a death or a preemption, is what it was the first time, to the bit."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from pdkv.config import DEFAULT_MODEL
from pdkv.kernels import host
from pdkv.kernels.linear import available
from pdkv.sampling.params import SamplingParams
from pdkv.testing.engine import InProcessEngine, output_of, submit

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 11 * j * j) % 500 + 3 for j in range(20 + 13 * i)] for i in range(12)]


def run(engine: InProcessEngine, salt: str, outputs: list[list[int]]) -> list[list[int]]:
    """All streams at once, each behind the output that it has already; returns their whole outputs."""
    asked = []
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        params = SamplingParams(temperature=2.0, max_tokens=NUM_TOKENS, seed=i, ignore_eos=True)
        name = f"{salt}-{i}"
        asked.append(submit(prompt, request_id=name, output_token_ids=output, params=params, cache_salt=salt))
    messages = engine.tell(*asked)
    return [output + output_of(messages, f"{salt}-{i}") for i, output in enumerate(outputs)]


WEIGHTS = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}, "int8": {"quantization": "int8"}}


@contextmanager
def running(weights: str, tokens_per_step: int = 2048) -> Iterator[InProcessEngine]:
    fields = {**WEIGHTS[weights], "max_num_batched_tokens": tokens_per_step, "max_num_seqs": 16}
    with closing(InProcessEngine.of_model(DEFAULT_MODEL, kv_cache_memory=32 << 20, **fields)) as engine:
        yield engine


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.skipif(not available(), reason="oneDNN's products depend on how many rows there are")
def test_prompts_cut_into_chunks_draw_the_tokens_of_whole_ones(weights: str, engine_isa: str) -> None:
    """Chunks of 17 tokens, less the decodes beside them: wherever it is cut, a token of a prompt gets the same bits."""
    outputs = []
    for tokens_per_step in (2048, 17):
        with running(weights, tokens_per_step) as engine:
            outputs.append(run(engine, "chunks", [[] for _ in PROMPTS]))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.skipif(not host.available(), reason="without the compiled kernel, attention depends on who shares a step")
def test_a_stream_that_goes_on_elsewhere_draws_the_tokens_of_an_undisturbed_one(weights: str, engine_isa: str) -> None:
    """In bfloat16 most sampled streams went on with another text when output tokens were computed again in tiles."""
    with running(weights) as engine:
        whole = run(engine, "undisturbed", [[] for _ in PROMPTS])
        for cut in (1, 9, NUM_TOKENS - 1):
            assert run(engine, f"cut at {cut}", [output[:cut] for output in whole]) == whole
