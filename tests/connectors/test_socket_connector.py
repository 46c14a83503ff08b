"""The example in examples/socket_connector: a transport in a package of its own serves real engines.

Its conformance is a row of tests/connector_kit/test_check.py.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import check_decode_computed_nothing, deployed, greedy_workload, run_all
from example_packages import EXAMPLES, check_wraps_no_shipped_connector, install_example


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example("socket_connector", tmp_path_factory)


def test_the_connector_is_short_and_wraps_none_of_the_shipped_ones() -> None:
    text = (EXAMPLES / "socket_connector/pdkv_sockets.py").read_text()
    assert len(text.splitlines()) <= 220
    check_wraps_no_shipped_connector(text)


def test_its_entry_point_serves_engines_with_the_right_tokens(
    installed: Path, hf_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(installed))
    workload = greedy_workload(hf_model("llama", initializer_range=0.2), tmp_path, 12)
    with deployed(workload, "--prefill", "1", "--decode", "1", "--connector", "sockets") as deployment:
        for _ in range(2):
            check_decode_computed_nothing(run_all(deployment, workload))
