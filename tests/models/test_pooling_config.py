"""How a model directory says that its hidden states are pooled."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdkv.errors import InvalidRequest
from pdkv.models.pooling_config import read_pooling


def write(path: Path, *modes: str, **fields: Any) -> Path:
    (path / "config.json").write_text(json.dumps({"hidden_size": 64, **fields}))
    if modes:
        (path / "1_Pooling").mkdir()
        flags = {f"pooling_mode_{name}": name in modes for name in ("lasttoken", "mean_tokens", "cls_token")}
        (path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))
    return path


@pytest.mark.parametrize(
    ("modes", "kind"), [((), "last"), (("lasttoken",), "last"), (("mean_tokens",), "mean"), (("cls_token",), None)]
)
def test_the_file_of_sentence_transformers_says_how(tmp_path: Path, modes: tuple[str, ...], kind: str | None) -> None:
    path = write(tmp_path, *modes)
    assert read_pooling(path).kind == kind
    assert read_pooling(path, "mean").kind == "mean"


def test_two_modes_are_refused_by_their_names(tmp_path: Path) -> None:
    pooling = read_pooling(write(tmp_path, "lasttoken", "mean_tokens"))
    with pytest.raises(InvalidRequest, match="pooling_mode_lasttoken and pooling_mode_mean_tokens"):
        pooling.checked_kind()


def test_dimensions_are_those_that_the_model_is_trained_for(tmp_path: Path) -> None:
    read_pooling(write(tmp_path, is_matryoshka=True)).check_dimensions(64)
    with pytest.raises(InvalidRequest, match=r"in \[1, 64\], got 65"):
        read_pooling(tmp_path).check_dimensions(65)
    of_two = read_pooling(write(tmp_path, matryoshka_dimensions=[16, 32]))
    of_two.check_dimensions(16)
    with pytest.raises(InvalidRequest, match=r"one of \[16, 32\], got 8"):
        of_two.check_dimensions(8)
