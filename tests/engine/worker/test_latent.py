"""Latent KV (MLA) gives what transformers computes: tokens and logprobs in float32, over every way to cut the work."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from attention_case import MIXES, Case, Shape, latent_case, without_compiled_kernel

from pdkv.engine.worker.attention import cpu
from pdkv.engine.worker.attention.backend import Layer
from pdkv.engine.worker.attention.cpu import CpuAttention
from pdkv.engine.worker.attention.plain_latents import expand
from tests.conftest import HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts, logprobs

torch.set_num_threads(1)

YARN = {
    "rope_type": "yarn", "factor": 8.0, "rope_theta": 10000.0, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 128,
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {"q_lora_rank": None}),
    "v2 groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "v3": ("deepseek_v3", {"rope_parameters": YARN}),
    "v3 by halves": ("deepseek_v3", {"rope_interleave": False, "qk_nope_head_dim": 8, "first_k_dense_replace": 3}),
}


def check(model_dir: Path, linears: Literal["auto", "torch"], chunk: int) -> None:
    drawn = draw_prompts(model_dir, [1, 17, 48, 130], 6)
    driver = StepDriver(model_dir, linears=linears)
    keys = {driver.add(str(i), prompt, logprobs=1): (prompt, output) for i, (prompt, output) in drawn.items()}
    outputs = driver.run(dict.fromkeys(keys, 6), budget=chunk, chunk=chunk)
    assert outputs == {key: output for key, (_, output) in keys.items()}


@pytest.mark.parametrize("chunk", [2048, 40])
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(hf_model: HFModel, variant: str, chunk: int) -> None:
    family, overrides = VARIANTS[variant]
    check(hf_model(family, **overrides), "auto" if chunk == 40 else "torch", chunk)


@pytest.mark.parametrize("variant", ["v2 groups", "v3"])
def test_logprobs_equal_transformers(hf_model: HFModel, variant: str) -> None:
    family, overrides = VARIANTS[variant]
    path = hf_model(family, **overrides)
    [(prompt, _)] = draw_prompts(path, [200], 1).values()
    driver = StepDriver(path)
    key = driver.add("a", prompt, prompt_logprobs=0)
    driver.run({key: 1}, chunk=70)
    found = [entry.logprob for entry in driver.prompt_logprobs[key] if entry is not None]
    expected = logprobs(path, prompt)[torch.arange(199), torch.tensor(prompt[1:])]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0.0, atol=1e-4)


def test_a_chunk_in_mid_prompt_alone_in_its_step(hf_model: HFModel) -> None:
    """Nothing is drawn then, and the last layer has no queries."""
    path = hf_model("deepseek_v3", rope_parameters=YARN)
    tokens = []
    for chunk in (8, 64):
        driver = StepDriver(path)
        key = driver.add("a", range(2, 22))
        tokens.append(driver.run({key: 2}, budget=chunk, chunk=chunk)[key])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_attention_over_rows_of_the_published_size(dtype: torch.dtype) -> None:
    """Prompts, chunks and outputs of 16 heads, in one step."""
    case = Case(MIXES[3], dtype, shape=Shape(16, 1, 576, layers=1))
    case.pool, case.qkv = case.pool[:, :, :1].contiguous(), case.qkv[:, :17].contiguous()
    layers = [Layer(0, 0, value_size=512)]
    found = case.run(CpuAttention(case.pool, 16, layers), 0)
    case.pool, case.qkv = case.pool.double(), case.qkv.double()
    expected = case.run(without_compiled_kernel(case.pool, 16, layers), 0)
    assert found.shape == (len(case.qkv), 16 * 512)
    close = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("last_only", [False, True])
def test_prompts_by_keys_and_values_of_their_own_equal_those_by_latents(
    last_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with and without context, beside outputs and a last token of a prompt, which go to the latents."""
    expanded = []
    monkeypatch.setattr(cpu, "expand", lambda heads, rows: expanded.append(len(rows)) or expand(heads, rows))
    case, heads, expected = latent_case([(0, 40), (37, 1), (0, 3), (30, 20), (90, 2), (15, 1)])
    found = case.run(CpuAttention(case.pool, 6, case.layers), 0, heads, last_only=last_only)
    expected = expected[case.last_rows] if last_only else expected
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert expanded == ([] if last_only else [3 + 1 + 4])
