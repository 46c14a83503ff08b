"""KV in FP8 with a checkpoint's scales: hand-offs and stores carry it as it is, and not to other engines."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from equality import TOPOLOGIES, Workload, check_decode_computed_nothing, deployed, run_all
from oracle import Expected, oracle
from safetensors.torch import load_file, save_file
from serving_checks import serve_directory

from pdkv import LLM, SamplingParams

OPTIONS = {"dtype": "float32", "kv_cache_memory": 8 << 20, "threads": 1}
FP8 = {**OPTIONS, "kv_cache_dtype": "fp8"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = serve_directory(hf_model("llama", initializer_range=0.2), tmp_path_factory.mktemp("scaled"))
    names = [f"model.layers.{layer}.self_attn.{side}_scale" for layer in range(2) for side in "kv"]
    weights = load_file(path / "model.safetensors")
    scales = dict(zip(names, torch.tensor([0.5, 0.02, 0.25, 0.01]), strict=True))
    save_file({**weights, **scales}, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def workload(model: Path) -> Workload:
    """What one engine says that computes all by itself."""
    chance = random.Random(5)
    prompts = [chance.choices(range(3, 200), k=length) for length in (1, 15, 16, 17, 48, 90, 130, 200)]
    prompts.append([*prompts[-1][:64], 7, 9])
    with LLM(model, **FP8) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return Workload(model, [Expected(p, o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)])


def test_fp8_changes_few_tokens(workload: Workload, hf_model: Callable[..., Path]) -> None:
    """A scale that only one side uses would change them all: K by a half, V to a fiftieth."""
    model = oracle(hf_model("llama", initializer_range=0.2))
    same = sum(model.generate(prompt, 1)[0] == output[0] for prompt, output in workload.expected)
    assert same >= len(workload.expected) - 1


@pytest.mark.parametrize("connector", [pytest.param("shared_memory", marks=pytest.mark.slow), "store"])
def test_tokens_of_two_engines_are_those_of_one(workload: Workload, connector: str, tmp_path: Path) -> None:
    """Twice: the second time prompts are found. Blocks of other sizes, so that units are cut out of them."""
    store = ["--connector-config", f"url=file://{tmp_path}/kv"] if connector == "store" else []
    flags = ["--dtype", "float32", "--kv-cache-dtype", "fp8", "--decode-block-size", "32"]
    with deployed(workload, *TOPOLOGIES["1P1D"], "--connector", connector, *store, *flags) as deployment:
        for _ in range(2):
            check_decode_computed_nothing(run_all(deployment, workload))


def found(path: Path, store: Path, prompts: Sequence[list[int]], **options: object) -> int:
    """Prompt tokens that an engine finds in the store; what it computes is there afterwards."""
    config = {"path": str(store), "lookup_timeout_s": "20"}
    with LLM(path, connector="shared_storage", connector_config=config, **options) as llm:  # type: ignore[arg-type]
        return sum(output.num_cached_tokens or 0 for output in llm.generate(prompts, GREEDY, use_tqdm=False))


def test_a_store_gives_it_to_engines_of_the_same_dtype_alone(workload: Workload, tmp_path: Path) -> None:
    prompts = [workload.expected[i].prompt for i in (5, 6)]  # of 90 and 130 tokens; a value has 64
    assert found(workload.path, tmp_path, prompts, **FP8) == 0
    assert found(workload.path, tmp_path, prompts, **OPTIONS) == 0
    assert found(workload.path, tmp_path, prompts, **FP8) == 64 + 128
    assert found(workload.path, tmp_path, prompts, **OPTIONS) == 64 + 128
