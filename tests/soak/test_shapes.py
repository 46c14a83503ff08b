"""Hostile shapes: each is refused or answered, and nothing of the others' breaks. Times are the soak's to judge."""

from pathlib import Path

import pytest
from deployments import launches
from serving_checks import serve_directory
from small_models import make_hf_model
from soak.shapes import FLAGS, disturb, markdown

NUM_REQUESTS = 24


@pytest.mark.slow
def test_hostile_shapes_harm_nobody(tmp_path: Path) -> None:
    model = serve_directory(make_hf_model(tmp_path / "model", "llama", "float32", initializer_range=0.2), tmp_path)
    with launches(model) as launch:
        result = disturb(launch("--prefill", "1", "--decode", "1", *FLAGS), NUM_REQUESTS, quiet_s=2.0, seed=1)
    assert result.violations == []
    assert sum(result.statuses.values()) == NUM_REQUESTS
    assert result.statuses["400 invalid_request_error"] > NUM_REQUESTS / 3
    assert result.gaps["num_gaps"] > 100
    assert result.honest_ms["num"] > 3
    assert "| recursive |" in markdown(result)
