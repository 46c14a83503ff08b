"""The runner computes what transformers computes: greedy tokens in float32 over every way to cut the work."""

from pathlib import Path

import pytest
import torch

from tests.conftest import FAMILIES, HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts

torch.set_num_threads(1)

LENGTHS = [1, 2, 15, 16, 17, 33, 64, 100, 129, 300, 600]
NUM_OUTPUT = 8


def check(
    model_dir: Path, lengths: list[int], *, budget: int = 2048, chunk: int = 2048, num_output: int = NUM_OUTPUT
) -> None:
    drawn = draw_prompts(model_dir, lengths, num_output)
    driver = StepDriver(model_dir)
    keys = {index: driver.add(str(index), prompt) for index, (prompt, _) in drawn.items()}
    outputs = driver.run(dict.fromkeys(keys.values(), num_output), budget=budget, chunk=chunk)
    assert {index: outputs[key] for index, key in keys.items()} == {i: output for i, (_, output) in drawn.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("budget", "chunk"), [(2048, 2048), (64, 48)])
def test_greedy_tokens_equal_transformers(hf_model: HFModel, family: str, budget: int, chunk: int) -> None:
    check(hf_model(family), LENGTHS, budget=budget, chunk=chunk)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_tokens_at_every_level_of_compiled_kernels(hf_model: HFModel, family: str, engine_isa: str) -> None:
    check(hf_model(family), [1, 33, 130], budget=64, chunk=48)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64, "rope_theta": 10000.0,
            }
        },
        {"tie_word_embeddings": True},
        {"head_dim": 24},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "num_hidden_layers": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"max_shard_size": "100KB"},
    ],
    ids=["linear", "llama3", "tied", "head_dim", "mha", "mqa-one-layer", "bias", "sharded"],
)  # fmt: skip
def test_llama_variants(hf_model: HFModel, overrides: dict[str, object]) -> None:
    check(hf_model("llama", **overrides), [1, 31, 300], chunk=100)


def test_a_request_resumes_from_its_output_and_reuses_a_slot(hf_model: HFModel) -> None:
    model_dir = hf_model("llama")
    drawn = draw_prompts(model_dir, [50, 70], 12)
    driver = StepDriver(model_dir, max_num_seqs=1)
    (prompt, expected), (other, other_expected) = drawn[0], drawn[1]
    key = driver.add("first", prompt)
    assert driver.run({key: 5})[key] == expected[:5]
    driver.end(key)
    key = driver.add("other", other)
    assert driver.run({key: 12})[key] == other_expected
    driver.end(key)
    key = driver.add("again", prompt, expected[:5])
    assert driver.run({key: 7})[key] == expected[5:]


def test_a_token_that_is_drawn_again_replaces_the_first(hf_model: HFModel) -> None:
    """After a failed load the scheduler goes back to an earlier position; the runner follows the plan's counters."""
    model_dir = hf_model("llama")
    prompt, expected = draw_prompts(model_dir, [40], 6)[0]
    driver = StepDriver(model_dir)
    key = driver.add("a", prompt)
    driver.step({key: 40})
    driver.tokens[key], driver.computed[key] = driver.tokens[key][:40], 16
    assert driver.run({key: 6})[key] == expected


def test_an_empty_step_draws_nothing(tiny_model_dir: Path) -> None:
    driver = StepDriver(tiny_model_dir)
    output = driver.step({})
    assert output.sampled == {}
    assert not output.transfers


def test_many_short_requests_in_one_batch(hf_model: HFModel) -> None:
    check(hf_model("qwen3"), [1 + i % 12 for i in range(40)], num_output=3)
