"""Small steps of small models run on one thread, everything else on all."""

from collections.abc import Iterator

import pytest
import torch

from pdkv.engine.worker.threads import StepThreads
from pdkv.models.config import ModelConfig


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_config(hidden_size: int) -> ModelConfig:
    heads = hidden_size // 32
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=64, hidden_size=hidden_size, num_layers=1, num_heads=heads,
        num_kv_heads=heads, head_size=32, intermediate_size=3 * hidden_size, max_position_embeddings=64,
        rms_norm_eps=1e-5, rope_theta=1e4, rotary_size=32, rope_scaling=None, tie_word_embeddings=True,
        attention_bias=False, attention_output_bias=False, mlp_bias=False, qk_norm=False, fused_weights=False,
        eos_token_ids=(), bos_token_id=None,
        dtype="bfloat16", windows=(None,),
    )  # fmt: skip


def test_a_small_model_shares_only_long_steps() -> None:
    threads = StepThreads(make_config(256), "bfloat16", 4)
    assert threads.count(8) == 1
    assert threads.count(2048) == 4


def test_a_large_layer_is_always_shared() -> None:
    assert StepThreads(make_config(2048), "bfloat16", 4).count(1) == 4


def test_torch_is_told_and_told_back() -> None:
    threads = StepThreads(make_config(256), "bfloat16", 2)
    torch.set_num_threads(2)
    with threads.used_for(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    with threads.used_for(2048):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 1
