"""Families of others: the example in examples/custom_model as a package of its own, and names that are no family."""

from pathlib import Path

import pytest
from example_packages import EXAMPLES, install_example

from pdkv.config import EngineConfig, HandoffConfig
from pdkv.connectors.plan import NO_PLAN
from pdkv.errors import ModelError
from pdkv.host.huge_pages import can_share_huge_pages
from pdkv.kernels.linear import available
from pdkv.launch.plan import _weights_of
from pdkv.launch.specs import EngineSpec
from pdkv.models.config import load_model_config
from pdkv.models.family import FAMILIES, find_family
from pdkv.models.shared_weights import shared_in
from pdkv.models.weight_files import WeightFile
from tests.conftest import HFModel
from tests.engine.worker.step_driver import StepDriver
from tests.engine.worker.transformers_oracle import draw_prompts


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(install_example("custom_model", tmp_path_factory))


def test_the_example_computes_what_transformers_does(
    hf_model: HFModel, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = hf_model("arcee", mlp_bias=True)
    with pytest.raises(ModelError, match="ArceeForCausalLM"):
        load_model_config(model_dir)
    assert len((EXAMPLES / "custom_model/pdkv_arcee.py").read_text().splitlines()) <= 80
    monkeypatch.syspath_prepend(package)
    prompt, output = draw_prompts(model_dir, [70], 5)[0]
    driver = StepDriver(model_dir)
    key = driver.add("a", prompt)
    assert driver.run({key: 5}, chunk=48)[key] == output


@pytest.mark.skipif(not available(), reason="no compiler when pdkv was installed")
@pytest.mark.skipif(not can_share_huge_pages(), reason="the kernel gives memfds no huge pages")
def test_its_weights_are_not_shared(
    hf_model: HFModel, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code may have changed between two starts, and lay out the same files in another way."""
    monkeypatch.syspath_prepend(package)
    monkeypatch.setattr(WeightFile, "is_settled", True)
    path, directory, engines = hf_model("arcee", mlp_bias=True), tmp_path / "weights", list[EngineSpec]()
    token = shared_in.set([directory])
    try:
        StepDriver(path)
    finally:
        shared_in.reset(token)
    assert not directory.exists()
    for name in "ab":
        engines.append(
            EngineSpec(
                name=name, role="any", epoch="1", config=EngineConfig(model=path, device="cpu"),
                handoff=HandoffConfig(), connector=NO_PLAN, endpoint="", num_engines=2,
            )
        )  # fmt: skip
    assert len({_weights_of(each) for each in engines}) == 2, "each has its own in the host's memory"


def test_a_file_cannot_name_a_module(tmp_path: Path) -> None:
    assert find_family(["os:system"]) is None
    assert FAMILIES.target("os:system") == "os:system", "which other callers may"
