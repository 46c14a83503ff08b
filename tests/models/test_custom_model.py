"""Families of others: the example in examples/custom_model as a package of its own, and names that are no family."""

from pathlib import Path

import pytest
from example_packages import EXAMPLES, install_example

from pdkv.errors import ModelError
from pdkv.models.config import load_model_config
from pdkv.models.family import FAMILIES, find_family
from tests.conftest import HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts


def test_the_example_computes_what_transformers_does(
    hf_model: HFModel, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = hf_model("arcee", mlp_bias=True)
    with pytest.raises(ModelError, match="ArceeForCausalLM"):
        load_model_config(model_dir)
    assert len((EXAMPLES / "custom_model/pdkv_arcee.py").read_text().splitlines()) <= 80
    monkeypatch.syspath_prepend(str(install_example("custom_model", tmp_path_factory)))
    prompt, output = draw_prompts(model_dir, [70], 5)[0]
    driver = StepDriver(model_dir)
    key = driver.add("a", prompt)
    assert driver.run({key: 5}, chunk=48)[key] == output


def test_a_file_cannot_name_a_module(tmp_path: Path) -> None:
    assert find_family(["os:system"]) is None
    assert FAMILIES.target("os:system") == "os:system", "which other callers may"
