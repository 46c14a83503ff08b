"""The example in examples/custom_connector: a package of its own, found by its entry point, serves real engines."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from equality import check_decode_computed_nothing, deployed, greedy_workload, run_all
from example_packages import EXAMPLES, check_wraps_no_shipped_connector, install_example


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example("custom_connector", tmp_path_factory)


def test_the_connector_is_short_and_wraps_none_of_the_shipped_ones() -> None:
    text = (EXAMPLES / "custom_connector/pdkv_sqlite.py").read_text()
    assert len(text.splitlines()) <= 58
    check_wraps_no_shipped_connector(text)


def test_its_entry_point_serves_engines_and_unknown_options_are_refused(
    installed: Path, hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    workload = greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path)
    flags = ["--prefill", "2", "--decode", "2", "--connector", "sqlite"]
    with deployed(workload, *flags, "--connector-config", f"path={tmp_path}/kv.db") as deployment:
        for _ in range(2):
            check_decode_computed_nothing(run_all(deployment, workload))
    for wrong in ((), ("--connector-config", "file=x")):
        command = [sys.executable, "-P", "-m", "pdkv.cli", "launch", "--model", str(workload.path), *flags, *wrong]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2
        assert "path" in done.stderr
