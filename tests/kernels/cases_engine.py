"""Engines over Triton's kernels beside transformers; run by test_triton.py, in a process of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracle import oracle
from serving_checks import serve_directory
from small_models import FEATURES

from pdkv import LLM, SamplingParams
from pdkv.models import passes


@pytest.mark.usefixtures("in_triton", "as_on_a_gpu")
@pytest.mark.parametrize("family", ["qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "phi3"))])
def test_an_engine_over_the_kernels_says_what_transformers_says(
    family: str, device: torch.device, hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decodes, one of them found in the cache in part; windows, and queries and keys that are
    normed, for qwen3.
    """
    directory = hf_model(family, initializer_range=0.2, **FEATURES.get(family, {}))
    prompts = [list(range(3, 3 + length)) for length in (5, 21, 33)]
    prompts.append([*prompts[-1], 7, 9])
    expected = [oracle(directory).generate(prompt, 3) for prompt in prompts]
    monkeypatch.setattr(passes.F, "rms_norm", lambda *_: pytest.fail("a norm by torch"))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    options = {"kv_cache_memory": 4 << 20, "max_num_batched_tokens": 24, "max_num_seqs": 4, "dtype": "float32"}
    with LLM(serve_directory(directory, tmp_path), device=device.type, threads=1, **options) as llm:
        outputs = llm.generate(prompts[:3], params, use_tqdm=False) + llm.generate(prompts[3:], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert outputs[-1].num_cached_tokens > 0
