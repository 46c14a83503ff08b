"""Pooled hidden states and logits of prompts in chunks are those of transformers in float32."""

import numpy as np
import pytest
import torch

from tests.conftest import HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import load

torch.set_num_threads(1)

LENGTHS = (1, 21, 130)
IDS = (7, 300, 4)


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3", "qwen3_moe")]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", *SLOW])
def test_pooled_states_equal_transformers(hf_model: HFModel, family: str) -> None:
    model_dir = hf_model(family)
    driver = StepDriver(model_dir)
    prompts = [[(7 * i * i + 3 * n) % 380 + 2 for i in range(n)] for n in LENGTHS]
    wanted = [_of_transformers(load(model_dir), prompt) for prompt in prompts]
    kinds = ("last", "mean", "logits")
    keys = {
        (i, kind): driver.add(f"{kind}{i}", prompt, pooling=kind, allowed_token_ids=IDS if kind == "logits" else None)
        for i, prompt in enumerate(prompts)
        for kind in kinds
    }
    driver.add("plain", prompts[1])
    driver.run({**dict.fromkeys(keys.values(), 1), ("plain", 0): 2}, budget=96, chunk=48)
    assert set(driver.pooled) == set(keys.values())
    for (i, kind), key in keys.items():
        np.testing.assert_allclose(np.frombuffer(driver.pooled[key], "<f4"), wanted[i][kind], atol=1e-4, err_msg=kind)


@torch.inference_mode()
def _of_transformers(model: torch.nn.Module, prompt: list[int]) -> dict[str, np.ndarray]:
    found = model(torch.tensor([prompt]), output_hidden_states=True)
    states, logits = found.hidden_states[-1][0], found.logits[0, -1]
    return {"last": states[-1].numpy(), "mean": states.mean(dim=0).numpy(), "logits": logits[list(IDS)].numpy()}
