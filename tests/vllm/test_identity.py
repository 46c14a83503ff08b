"""What vLLM's KV is keyed by: other weights, another computation or another adapter never find it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdkv.errors import ConfigError
from pdkv.models.identity import model_identity
from pdkv.vllm import identity as vllm_identity
from pdkv.vllm.identity import AdapterIdentities, computation_identity, weights_identity

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def vllm_config(*, load_format: str = "auto", model: dict[str, Any] | None = None, **fields: Any) -> SimpleNamespace:
    """As vLLM resolves it; `fields`: of config.json."""
    import transformers

    hf_config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=2, **fields)
    values = {"model": "org/name", "revision": None, "dtype": "torch.float32", "quantization": None, **(model or {})}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, **values),
        load_config=SimpleNamespace(load_format=load_format, model_loader_extra_config={}),
    )


@pytest.mark.parametrize(
    "other",
    [
        {"rms_norm_eps": 1e-3},  # --hf-overrides
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"model": {"dtype": "torch.bfloat16"}},
        {"model": {"quantization": "fp8"}},
        {"load_format": "dummy"},
    ],
    ids=str,
)
def test_another_computation_is_another_identity(other: dict[str, Any]) -> None:
    assert computation_identity(vllm_config(**other)) != computation_identity(vllm_config())


def test_the_length_counts_where_it_chooses_the_factors_of_rope() -> None:
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}

    def at(length: int, **fields: Any) -> str:
        return computation_identity(vllm_config(model={"max_model_len": length}, num_attention_heads=1, **fields))

    assert at(64, rope_parameters=rope) != at(128, rope_parameters=rope)
    assert at(64) == at(128)


def test_the_same_computation_is_the_same_identity() -> None:
    renamed = vllm_config(name_or_path="elsewhere")
    renamed.model_config.hf_config._commit_hash = COMMIT
    assert computation_identity(renamed) == computation_identity(vllm_config())


def test_weights_are_known_by_their_bytes_or_their_commit(hf_model: Callable[..., Path]) -> None:
    path = hf_model("llama")
    assert weights_identity(vllm_config(model={"model": str(path)}).model_config) == model_identity(path)
    at_commit = vllm_config(model={"revision": COMMIT})
    assert weights_identity(at_commit.model_config) == f"org/name@{COMMIT}"
    resolved = vllm_config(model={"revision": "main"})
    resolved.model_config.hf_config._commit_hash = COMMIT
    assert weights_identity(resolved.model_config) == f"org/name@{COMMIT}"


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_branch_that_may_move_is_no_identity(revision: str | None) -> None:
    with pytest.raises(ConfigError, match=r"org/name.*--revision"):
        weights_identity(vllm_config(model={"revision": revision}).model_config)


def lora(path: Path, number: int = 1, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name="tuned", lora_int_id=number, lora_path=str(path), **fields)


def test_an_adapter_is_known_by_every_byte_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(bytes(1000))
    before = AdapterIdentities().of(lora(tmp_path))
    assert before
    weights.write_bytes(bytes(999) + b"\1")  # trained on, saved to the same path
    assert AdapterIdentities().of(lora(tmp_path)) not in (before, "", None)


def test_files_that_changed_are_no_identity_until_vllm_loads_them_under_a_new_number(tmp_path: Path) -> None:
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    identities = AdapterIdentities()
    before = identities.of(lora(tmp_path))
    assert identities.of(lora(tmp_path)) == before
    weights.write_bytes(b"longer")
    assert identities.of(lora(tmp_path)) is None, "vLLM may have either"
    after = identities.of(lora(tmp_path, 2))
    assert after not in (before, None)
    assert identities.of(lora(tmp_path, load_inplace=True)) == after
    assert identities.of(lora(tmp_path)) == after


def test_an_adapter_is_read_once_per_state_and_not_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read on vLLM's scheduler thread; `load_inplace` is in every request of such an adapter."""
    weights, reads = tmp_path / "adapter_model.safetensors", []
    weights.write_bytes(b"one")
    digest = vllm_identity._digest

    def count(path: Path, names: Iterable[str]) -> str:
        reads.append(path)
        return digest(path, names)

    def overtake(path: Path, names: Iterable[str]) -> str:
        weights.write_bytes(b"written meanwhile")
        return digest(path, names)

    identities = AdapterIdentities()
    with monkeypatch.context() as patch:
        patch.setattr(vllm_identity, "_digest", count)
        found = {identities.of(lora(tmp_path, load_inplace=True)) for _ in range(3)}
    assert (len(found), len(reads)) == (1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_identity, "_digest", overtake)
        assert AdapterIdentities().of(lora(tmp_path)) is None


def test_an_adapter_that_is_not_here_has_no_identity(tmp_path: Path) -> None:
    assert AdapterIdentities().of(lora(tmp_path / "missing")) is None
    assert AdapterIdentities().of(lora(tmp_path)) is None, "an empty directory"
    assert AdapterIdentities().of(None) == ""
