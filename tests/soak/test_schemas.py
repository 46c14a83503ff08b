"""Schemas of the JSON Schema Test Suite through engines: each is refused, or its answer fulfils it."""

from pathlib import Path

from deployments import launches
from schema_suite import groups
from serving_checks import serve_directory
from small_models import make_hf_model
from soak.schemas import FLAGS, ask_all


def test_answers_fulfil_their_schemas(tmp_path: Path) -> None:
    suite = list(groups())[::24]
    made = make_hf_model(tmp_path / "model", "llama", "float32", max_position_embeddings=2048)
    model = serve_directory(made, tmp_path)
    with launches(model) as launch:
        result = ask_all(launch("--prefill", "1", "--decode", "1", *FLAGS), suite, model)
    assert result.violations == []
    assert result.answered + sum(result.refused.values()) == len(suite)
    assert result.answered > len(suite) / 3
    assert result.share_complete >= 0.8
