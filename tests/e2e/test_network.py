"""A bad network between two hosts under load, and the pods of the Helm chart: nothing is failed, wrong or hung.

`make chaos` runs the same for longer.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.network import TROUBLES, run_on
from hosts import hosts_or_skip

pytestmark = pytest.mark.slow


def test_a_bad_network_costs_no_request_and_all_blocks_come_back(served_model: Path) -> None:
    short = [trouble for trouble in TROUBLES if trouble.seconds <= 1.0]
    others = [trouble._replace(seconds=3.0) for trouble in TROUBLES if trouble.kind not in {t.kind for t in short}]
    with hosts_or_skip() as hosts:
        outcomes = run_on(hosts, served_model, [*short, *others], num=18, rate=4.0)
    assert len(outcomes) == len(short) + len(others)
    assert not sum(outcome.lost for outcome in outcomes), outcomes


def test_pods_that_are_replaced_and_lost_cost_no_request() -> None:
    """The commands of the Helm chart, with a DNS server."""
    pytest.importorskip("helm_python")
    harness = Path(__file__).parents[1] / "harness"
    done = subprocess.run(
        [sys.executable, "-m", "pods", "--requests", "18"], cwd=harness, env=os.environ | {"PYTHONPATH": ""},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("needs network namespaces of its own (unshare --user --net)")
    assert done.returncode == 0, done.stdout + done.stderr
