"""Bad HTTP clients: no 5xx, no process ends, memory stays. The time of /health is the soak's to judge."""

from pathlib import Path

from deployments import launches
from serving_checks import serve_directory
from small_models import make_hf_model
from soak.http_fuzz import fuzz

NUM_REQUESTS = 100


def test_no_request_harms_the_router(tmp_path: Path) -> None:
    model = serve_directory(make_hf_model(tmp_path / "model", "llama", "float32"), tmp_path)
    with launches(model) as launch:
        deployment = launch("--prefill", "1", "--decode", "1")
        result = fuzz(deployment, NUM_REQUESTS, seed=7)
        assert result.violations == []
        assert result.statuses["200"] > 5
        assert result.statuses["400"] > 30
        assert deployment.complete("x", max_tokens=2).status_code == 200
