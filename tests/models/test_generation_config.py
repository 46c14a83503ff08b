"""Sampling defaults of generation_config.json: what is taken, what is refused, what the log says."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pdkv.config import DEFAULT_MODEL
from pdkv.errors import ModelError
from pdkv.models.generation_config import log_sampling_defaults, read_sampling_defaults

QWEN: dict[str, Any] = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
    "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "transformers_version": "4.37.0",
}  # fmt: skip


def write(path: Path, **values: Any) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_what_vllm_takes_is_taken(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    taken = {"repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    assert read_sampling_defaults(write(tmp_path, **QWEN)) == taken
    more = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert read_sampling_defaults(write(tmp_path, **more, max_new_tokens=2048, top_k=None)) == {
        **more,
        "max_tokens": 2048,
    }


def test_none_leaves_all_of_it_out(tmp_path: Path) -> None:
    assert read_sampling_defaults(write(tmp_path, **QWEN), "none") == {}
    assert read_sampling_defaults(write(tmp_path, temperature="hot"), "none") == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", True),
        ("top_k", 1.5),
        ("top_k", float("inf")),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", [16]),
    ],
)
def test_a_value_that_no_request_could_have_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=name) as refused:
        read_sampling_defaults(write(tmp_path, **{name: value}))
    assert str(tmp_path / "generation_config.json") in str(refused.value)
    assert str(refused.value).endswith("; generation_config none ignores the file")  # of `pd launch` and of `LLM`
    assert str(value) in str(refused.value)


def test_the_log_says_what_was_taken_where_it_changes_anything(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for values in ({}, {"temperature": 1.0, "top_p": 1.0, "eos_token_id": 3}):
            log_sampling_defaults(tmp_path, read_sampling_defaults(write(tmp_path, **values)))
        assert not caplog.records
        log_sampling_defaults(tmp_path, read_sampling_defaults(write(tmp_path, **QWEN, min_p=0.0)))
    (record,) = caplog.records
    for said in ("temperature=0.7", "top_k=20", "top_p=0.8", "repetition_penalty=1.05", "generation_config none"):
        assert said in record.getMessage()
    assert "min_p" not in record.getMessage()


def test_the_embedded_model_has_no_sampling_defaults() -> None:
    """`make demo` and the README's commands show codes that it knows, which it would not always draw."""
    assert read_sampling_defaults(DEFAULT_MODEL) == {}
