"""A hostile tenant beside a polite one: no answer is lost and no process ends. Times are the soak's to judge."""

from pathlib import Path

import pytest
from deployments import launches
from serving_checks import serve_directory
from small_models import make_hf_model
from soak.hostile_tenant import MEANS
from soak.tenants import FLAGS, disturb, make_keys


@pytest.mark.slow
def test_a_hostile_tenant_costs_another_one_no_answer(tmp_path: Path) -> None:
    model = serve_directory(make_hf_model(tmp_path / "model", "llama", "float32"), tmp_path)
    keys = make_keys(tmp_path / "keys.toml")
    with launches(model) as launch:
        flags = ("--prefill", "1", "--decode", "1", *FLAGS, "--api-key-file", str(tmp_path / "keys.toml"))
        result = disturb(launch(*flags), keys, 4.0)
    assert result.violations == []
    assert result.victim["ttft_num"] >= 4
    assert result.victim_before["gap_num"] > 100
    assert result.hostile["used"] == sorted(MEANS)
    assert result.tokens["hostile"] > 0
