"""The example in examples/custom_connector: a package of its own, found by its entry point, serves real engines."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import warm
from equality import check_decode_computed_nothing, deployed, greedy_workload, run_all
from example_packages import EXAMPLES, check_wraps_no_shipped_connector, install_example


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example("custom_connector", tmp_path_factory)


def test_the_connector_is_short_and_wraps_none_of_the_shipped_ones() -> None:
    text = (EXAMPLES / "custom_connector/pdkv_sqlite.py").read_text()
    assert len(text.splitlines()) <= 58
    check_wraps_no_shipped_connector(text)


def test_its_store_is_a_scheme_of_urls_and_a_tier_behind_host_memory(
    installed: Path, hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    workload = greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path, 12)
    tiers = ["--kv-host-memory", "16MiB", "--kv-store", f"sqlite://{tmp_path}/kv.db"]
    with deployed(workload, "--prefill", "1", "--decode", "1", "--connector", "shared_memory", *tiers) as deployment:
        run_all(deployment, workload)
    assert num_values(tmp_path / "kv.db")


def num_values(path: Path) -> int:
    """Rows of the store's table."""
    with closing(sqlite3.connect(path)) as db:
        return int(db.execute("SELECT count(*) FROM kv").fetchone()[0])


def test_its_entry_point_serves_engines_and_unknown_options_are_refused(
    installed: Path, hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    workload = greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path, 12)
    flags = ["--prefill", "1", "--decode", "1", "--connector", "sqlite"]
    with deployed(workload, *flags, "--connector-config", f"path={tmp_path}/kv.db") as deployment:
        for _ in range(2):
            check_decode_computed_nothing(run_all(deployment, workload))
    for wrong in ((), ("--connector-config", "file=x")):
        done = warm.run([*warm.COMMAND, "launch", "--model", str(workload.path), *flags, *wrong])
        assert done.returncode == 2
        assert "path" in done.stderr
