"""DeepSeek's configurations and weights: what is read, divided among ranks, read past, and refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from safetensors.torch import load_file, save_file

from pdkv.engine.worker.kv_cache import make_layout
from pdkv.errors import ModelError
from pdkv.models.config import load_model_config
from pdkv.models.decoder import Decoder
from pdkv.models.latent_heads import LatentHeads
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from pdkv.models.shard import Shard
from tests.conftest import HFModel

torch.set_num_threads(1)

YARN = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "ep_size": 1,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": YARN, "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
"""As published, without quantization."""


def write(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps({**V3, **changes}))
    return path


def test_the_published_configuration_has_a_row_of_576_numbers_for_each_token_and_layer(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path))
    for rank in range(2):
        layout = make_layout(config, block_size=16, dtype="bfloat16", shard=Shard(rank, 2))
        assert (layout.kinds, layout.num_kv_heads, layout.kv_heads_of_all_ranks) == (("latent",), 1, 1)
        assert layout.token_bytes == 576 * 2 * 61
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * torch.tensor(40.0).log().item() + 1) ** 2)
    assert (config.rotary_size, config.extra_layers, config.num_positions) == (64, 1, 163840)
    assert config.experts is not None
    assert (config.experts.layers[0], config.experts.groups, config.experts.shared_size) == (3, 8, 2048)
    kimi = load_model_config(write(tmp_path, model_type="kimi_k2", n_group=1, topk_group=1, n_routed_experts=384))
    assert kimi.latent == config.latent


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not num_attention_heads, 128"),
        ({"qk_head_dim": 128}, "qk_head_dim 128 is not"),
        ({"kv_lora_rank": 2048}, "kv_lora_rank 2048 must be even, and with qk_rope_head_dim 64 at most 1024"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"qk_rope_head_dim": 63}, "head size must be even, got 63"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not supported, only 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"num_nextn_predict_layers": -1}, "must be a whole number up to 1000, got -1"),
        ({"auto_map": {"AutoConfig": "configuration_mine.Config"}}, "auto_map"),
        ({"index_topk": 2048}, "index_topk"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load_model_config(write(tmp_path, **changes))


def load(path: Path, parallel: TensorParallel = ALONE) -> Decoder:
    config = load_model_config(path)
    cpu = torch.device("cpu")
    return load_decoder(path, config, dtype=torch.float32, device=cpu, max_model_len=64, parallel=parallel)


def test_ranks_make_the_same_rows_and_the_logits_of_one_rank(hf_model: HFModel) -> None:
    """Each makes every token's row, to the bit; the heads are divided."""
    path = hf_model("deepseek_v3")
    tokens = torch.randint(2, 384, (20,), generator=torch.Generator().manual_seed(0))

    def run(parallel: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        model, rows = load(path, parallel), []

        def attend(layer: int, qkv: torch.Tensor, heads: LatentHeads) -> torch.Tensor:
            heads.absorb(qkv, slice(None))
            rows.append(qkv[:, -1].clone())
            q, row = qkv[:, :-1].transpose(0, 1), qkv[:, -1:].transpose(0, 1)
            scale = model.config.attention_scale
            expanded = row.expand(len(q), -1, -1)
            out = torch.nn.functional.scaled_dot_product_attention(q, expanded, expanded, is_causal=True, scale=scale)
            return heads.results(out[..., :32].transpose(0, 1))

        with torch.inference_mode():
            logits = model.logits(model.forward(tokens, torch.arange(20), attend, None))
        return logits, torch.stack(rows)

    expected, rows = run(ALONE)
    (first, of_first), (second, of_second) = on_ranks(2, run)
    torch.testing.assert_close(first, expected, rtol=0.0, atol=1e-4)
    assert torch.equal(first, second)
    assert torch.equal(of_first, of_second)
    torch.testing.assert_close(of_first, rows, rtol=1e-4, atol=1e-4)


def test_layers_that_guess_further_tokens_are_read_past_and_others_are_not(hf_model: HFModel, tmp_path: Path) -> None:
    path = Path(shutil.copytree(hf_model("deepseek_v3"), tmp_path / "model"))
    fields, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    save_file(weights | extra, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 1}))
    load(path)
    (path / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match=r"model\.layers\.3\.eh_proj"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "missing", "message"),
    [
        ({"kv_lora_rank": 48}, "", r"kv_a_proj_with_mqa.*\(48, 64\).*\(64, 64\)"),
        ({"v_head_dim": 16}, "", r"kv_b_proj.*\(176, 32\).*\(160, 32\)"),
        ({"q_lora_rank": None}, "", r"q_proj.*missing"),
        ({}, "model.layers.1.self_attn.kv_b_proj.weight", r"layers\.1\.self_attn\.kv_b_proj.*missing"),
    ],
)
def test_weights_of_other_sizes_are_named(
    hf_model: HFModel, tmp_path: Path, changes: dict[str, Any], missing: str, message: str
) -> None:
    path = Path(shutil.copytree(hf_model("deepseek_v3"), tmp_path / "model"))
    fields, weights = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    weights.pop(missing, None)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**fields, **changes}))
    with pytest.raises(ModelError, match=message):
        load(path)
