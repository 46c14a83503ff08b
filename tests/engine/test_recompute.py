"""What is computed again, behind a death or a preemption, is what it was the first time, to the bit."""

import time

import pytest
from engines import output_of

from pdkv.build_engine import build_engine
from pdkv.config import DEFAULT_MODEL, EngineConfig
from pdkv.engine.core import EngineCore
from pdkv.kernels import host
from pdkv.kernels.linear import level
from pdkv.sampling_params import SamplingParams
from pdkv.wire.messages import EngineToRouter, Submit

NUM_TOKENS = 24
PROMPTS = [[(7 * i + 11 * j * j) % 500 + 3 for j in range(20 + 13 * i)] for i in range(12)]


def run(core: EngineCore, salt: str, outputs: list[list[int]]) -> list[list[int]]:
    """All streams at once, each behind the output that it has already; returns their whole outputs."""
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        params = SamplingParams(temperature=2.0, max_tokens=NUM_TOKENS, seed=i, ignore_eos=True)
        name = f"{salt}-{i}"
        submit = Submit(
            request_id=name,
            transfer_id=name,
            attempt=0,
            prompt_token_ids=prompt,
            output_token_ids=output,
            params=params,
            cache_salt=salt,
        )
        core.handle("r", submit, time.monotonic())
    messages: list[EngineToRouter] = []
    while core.requests:
        core.step(time.monotonic())
        messages += [message for _, sent in core.take_messages(time.monotonic()) for message in sent]
    return [output + output_of(messages, f"{salt}-{i}") for i, output in enumerate(outputs)]


def make_core(dtype: str, tokens_per_step: int = 2048) -> EngineCore:
    config = EngineConfig(
        model=DEFAULT_MODEL,
        device="cpu",
        dtype=dtype,
        kv_cache_memory=32 << 20,
        threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=tokens_per_step,  # type: ignore[arg-type]
    )
    core = build_engine(config, name="e", epoch="1")
    core.router_joined("r", "1")
    return core


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(level() == 0, reason="oneDNN's products depend on how many rows there are")
def test_prompts_cut_into_chunks_draw_the_tokens_of_whole_ones(dtype: str) -> None:
    """Chunks of 17 tokens, less the decodes beside them: wherever it is cut, a token of a prompt gets the same bits."""
    outputs = []
    for tokens_per_step in (2048, 17):
        core = make_core(dtype, tokens_per_step)
        try:
            outputs.append(run(core, "chunks", [[] for _ in PROMPTS]))
        finally:
            core.shutdown()
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(not host.available(), reason="without the compiled kernel, attention depends on who shares a step")
def test_a_stream_that_goes_on_elsewhere_draws_the_tokens_of_an_undisturbed_one(dtype: str) -> None:
    """In bfloat16 most sampled streams went on with another text when output tokens were computed again in tiles."""
    core = make_core(dtype)
    try:
        whole = run(core, "undisturbed", [[] for _ in PROMPTS])
        for cut in (1, 9, NUM_TOKENS - 1):
            assert run(core, f"cut at {cut}", [output[:cut] for output in whole]) == whole
    finally:
        core.shutdown()
