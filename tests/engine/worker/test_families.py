"""Families that differ from Llama in their mathematics: tokens and logprobs are those of transformers in float32."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdkv.errors import ModelError
from pdkv.models.config import load_model_config
from pdkv.models.loader import load_decoder
from tests.conftest import HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts, logprobs

torch.set_num_threads(1)

FAMILIES = ("qwen3_moe", "mixtral")
LENGTHS = [1, 17, 130]
NUM_OUTPUT = 6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("linears", ["auto", "torch"])
def test_tokens_and_logprobs_equal_transformers(hf_model: HFModel, family: str, linears: Any) -> None:
    """Prompts in chunks beside decodes, by compiled kernels and by torch."""
    model_dir = hf_model(family)
    drawn = draw_prompts(model_dir, LENGTHS, NUM_OUTPUT)
    driver = StepDriver(model_dir, linears=linears)
    keys = {i: driver.add(str(i), prompt, prompt_logprobs=0) for i, (prompt, _) in drawn.items()}
    outputs = driver.run(dict.fromkeys(keys.values(), NUM_OUTPUT), budget=64, chunk=48)
    for i, (prompt, output) in drawn.items():
        assert outputs[keys[i]] == output
        expected = logprobs(model_dir, prompt)
        found = [entry.logprob for entry in driver.prompt_logprobs.get(keys[i], []) if entry is not None]
        wanted = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0)


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
