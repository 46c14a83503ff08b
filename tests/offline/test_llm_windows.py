"""Sliding windows against transformers: prompts and outputs around the window's edge, in chunks of odd sizes."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deployments import link_text_model
from oracle import oracle

from pdkv import LLM, SamplingParams

WINDOW, NUM_OUTPUT = 24, 12
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "overrides", "groups"),
    [
        ("mistral", {}, [(0, 1, 2)]),
        ("ministral", {"layer_types": ALTERNATING, "head_dim": 16}, [(1,), (0,), (2,)]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, [(0,), (1,), (2,)]),
        ("phi3", {}, [(0, 1, 2)]),
    ],
    ids=["all", "alternating", "from-a-layer-on", "phi3"],
)
def test_tokens_beyond_the_window_are_those_of_transformers(
    hf_model: Callable[..., Path], tmp_path: Path, family: str, overrides: dict[str, Any], groups: list[tuple[int, ...]]
) -> None:
    made = hf_model(family, sliding_window=WINDOW, initializer_range=0.2, max_position_embeddings=512, **overrides)
    link_text_model(made, tmp_path)
    rng = random.Random(5)
    lengths = (3, WINDOW - NUM_OUTPUT, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 300)
    expected = [
        oracle(made).expect(lambda size=size: [rng.randrange(2, 258) for _ in range(size)], NUM_OUTPUT)
        for size in lengths
    ]
    for fields in ({}, {"long_prefill_token_threshold": 7, "max_num_batched_tokens": 40, "max_num_seqs": 40}):
        with LLM(tmp_path, kv_cache_memory=4 << 20, threads=1, **fields) as llm:
            assert llm._engine.core.card.max_model_len == 512
            assert [group.layers for group in llm._engine.core.card.layout.groups] == groups
            for _ in range(2):  # the second time from the cache
                outputs = llm.generate([one.prompt for one in expected], PARAMS, use_tqdm=False)
                assert [output.outputs[0].token_ids for output in outputs] == [one.output for one in expected]


def test_llms_of_one_process_share_what_two_groups_hold(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """The memory connector's store keeps groups apart: windows are saved and loaded as windows."""
    overrides = {"layer_types": ALTERNATING, "head_dim": 16}
    made = hf_model("ministral", sliding_window=WINDOW, initializer_range=0.2, max_position_embeddings=512, **overrides)
    link_text_model(made, tmp_path)
    rng = random.Random(7)
    expected = [oracle(made).expect(lambda: [rng.randrange(2, 258) for _ in range(300)], NUM_OUTPUT) for _ in range(2)]
    options = {"mode": "store", "fabric": "two-groups"}

    def tokens_of(llm: LLM) -> tuple[list[list[int]], list[int]]:
        outputs = llm.generate([one.prompt for one in expected], PARAMS, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs], [output.num_cached_tokens for output in outputs]

    with (
        LLM(tmp_path, kv_cache_memory=4 << 20, threads=1, connector="memory", connector_config=options) as first,
        LLM(tmp_path, kv_cache_memory=4 << 20, threads=1, connector="memory", connector_config=options) as second,
    ):
        assert [group.window for group in first.card.layout.groups] == [0, WINDOW, WINDOW]
        right = [one.output for one in expected]
        assert tokens_of(first) == (right, [0, 0])
        assert tokens_of(second) == (right, [256, 256])


def test_a_windows_layers_take_the_memory_of_the_window(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """Three prompts of 450 tokens in a pool that holds 224, were it not for the window."""
    made = hf_model("mistral", sliding_window=WINDOW, initializer_range=0.2, max_position_embeddings=512)
    link_text_model(made, tmp_path)
    rng = random.Random(6)
    expected = [oracle(made).expect(lambda: [rng.randrange(2, 258) for _ in range(450)], NUM_OUTPUT) for _ in range(3)]
    block_bytes = 3 * 2 * 2 * 16 * 16 * 4  # layers, K and V, heads, tokens, head size, float32
    with LLM(tmp_path, kv_cache_memory=14 * block_bytes, threads=1, max_num_batched_tokens=48, max_num_seqs=48) as llm:
        assert llm._engine.core.card.max_model_len == 512
        assert llm._engine.core.card.num_blocks == 14
        outputs = llm.generate([one.prompt for one in expected], PARAMS, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [one.output for one in expected]
