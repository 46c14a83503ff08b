"""A short soak of each backend: whatever goes wrong, no token is wrong, no request hangs and nothing is left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from soak.backends import BACKENDS

HARNESS = Path(__file__).parents[1] / "harness"
SECONDS = 6
BOUND_S = 600


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "ranks"), [("shared_memory", "1,2"), *((name, "1,1") for name in BACKENDS)])
def test_chaos_makes_no_token_wrong_and_leaves_nothing(backend: str, ranks: str, tmp_path: Path) -> None:
    """F1, F2, F3, F4, F5, F6, F7, F17, F24."""
    command = [sys.executable, "-m", "soak", "--seconds", str(SECONDS), "--tp", ranks, "--out", str(tmp_path)]
    run = subprocess.run(
        [*command, "--backends", backend], cwd=HARNESS, capture_output=True, text=True, timeout=BOUND_S
    )
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    (document,) = tmp_path.glob("*.json")
    (report,) = json.loads(document.read_text()).values()
    if report["skipped"]:
        pytest.skip(report["skipped"])
    assert report["violations"] == []
    assert report["outcomes"]["right"] > 10
    assert sum(report["events"].values()) > 1
