"""Files of tests that run over Triton, in a process of their own: its interpreter must be chosen before Triton is
imported, which other tests may have done.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WAYS = [
    "interpreter",
    pytest.param("interpreter, slow ones", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def run_cases(*paths: Path, way: str = "interpreter") -> None:
    """All of them pass: over the interpreter those that are slow, or those that are not."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    chosen: list[str] = []
    if way != "cuda":
        environment["TRITON_INTERPRET"] = "1"
        chosen = ["-m", "slow" if "slow" in way else "not slow"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *map(str, paths)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600 if "slow" in way else 900,
        check=False,
    )
    has_none = "slow" in way and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert has_none or done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert has_none or " passed" in done.stdout
