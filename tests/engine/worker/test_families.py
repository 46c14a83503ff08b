"""Families that differ from Llama in their mathematics: tokens and logprobs are those of transformers in float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import on_ranks
from safetensors.torch import load_file, save_file
from small_models import FEATURES, NEWER

from pdkv.errors import ModelError
from pdkv.models.config import load_model_config
from pdkv.models.heads import Heads
from pdkv.models.loader import load_decoder
from pdkv.models.parallel import ALONE, TensorParallel
from tests.conftest import HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts, logprobs

torch.set_num_threads(1)

LENGTHS = [17, 130]
NUM_OUTPUT = 4


@pytest.mark.parametrize("family", [*NEWER, "phi3"])
def test_tokens_and_logprobs_equal_transformers(hf_model: HFModel, family: str) -> None:
    """Prompts in chunks beside decodes, by compiled kernels and by torch."""
    model_dir = hf_model(family, **FEATURES.get(family, {}))
    drawn = draw_prompts(model_dir, LENGTHS, NUM_OUTPUT)
    for linears in ("auto", "torch"):
        driver = StepDriver(model_dir, linears=linears)
        keys = {i: driver.add(str(i), prompt, prompt_logprobs=0) for i, (prompt, _) in drawn.items()}
        outputs = driver.run(dict.fromkeys(keys.values(), NUM_OUTPUT), budget=64, chunk=48)
        for i, (prompt, output) in drawn.items():
            assert outputs[keys[i]] == output
            found = [entry.logprob for entry in driver.prompt_logprobs[keys[i]] if entry is not None]
            wanted = logprobs(model_dir, prompt)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", NEWER)
def test_two_ranks_compute_what_one_does(hf_model: HFModel, family: str) -> None:
    config, tokens = load_model_config(hf_model(family)), torch.arange(2, 40)

    def attend(layer: int, qkv: torch.Tensor, heads: Heads | None) -> torch.Tensor:
        assert heads is not None
        heads.apply(qkv)
        groups = qkv.shape[1] // 4  # 2 queries for each key and value
        q, k, v = qkv.transpose(0, 1).split((2 * groups, groups, groups))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)

    @torch.inference_mode()
    def run(parallel: TensorParallel) -> torch.Tensor:
        torch.set_num_threads(1)
        device, path = torch.device("cpu"), hf_model(family)
        model = load_decoder(path, config, dtype=torch.float32, device=device, max_model_len=64, parallel=parallel)
        return model.logits(model.forward(tokens, torch.arange(len(tokens)), attend, None))

    for found in on_ranks(2, run):
        torch.testing.assert_close(found, run(ALONE), atol=2e-4, rtol=1e-4)


def changed(model_dir: Path, path: Path, **fields: Any) -> Path:
    """A copy with other fields in its config.json."""
    shutil.copytree(model_dir, path, dirs_exist_ok=True)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **fields}))
    return path


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts for each token .* only 8"),
        ("qwen3_moe", {"num_experts": 4}, "'num_experts' and 'num_local_experts' differ"),
        ("qwen3_moe", {"mlp_only_layers": [3]}, "mlp_only_layers"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("glm4_moe", {"n_group": 3}, "cannot be divided into 3 groups"),
        ("glm4_moe", {"first_k_dense_replace": float("nan")}, "first_k_dense_replace"),
        ("glm4_moe", {"num_nextn_predict_layers": 2**31}, "num_nextn_predict_layers"),
        ("glm4_moe", {"topk_group": 5}, "5 groups for each token"),
        ("glm4_moe", {"topk_group": 1}, "fewer than 3 experts"),
        ("glm4_moe", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers"),
        ("glm4", {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    hf_model: HFModel, tmp_path: Path, family: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        load_model_config(changed(hf_model(family), tmp_path, **fields))


EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
GATE = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (EXPERT, None, f"{EXPERT}' is missing"),
        (EXPERT, torch.ones(47, 64), EXPERT),
        ("model.layers.2.mlp.experts.8.up_proj.weight", torch.ones(48, 64), "does not use 1 tensors"),
        (GATE, torch.full((8, 64), torch.nan), f"{GATE}' has NaN"),
        (GATE, torch.ones(9, 64), GATE),
    ],
)
def test_experts_that_do_not_fit_are_named(
    hf_model: HFModel, tmp_path: Path, name: str, tensor: torch.Tensor | None, named: str
) -> None:
    path = changed(hf_model("qwen3_moe"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors | ({} if tensor is None else {name: tensor}), path / "model.safetensors")
    config = load_model_config(path)
    with pytest.raises(ModelError, match=named):
        load_decoder(path, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64)
