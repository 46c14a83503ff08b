"""What tests and benchmarks share lies in tests/support and tests/harness."""

import importlib
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"


def support_module(name: str) -> Any:
    """A module of either."""
    for folder in ("support", "harness"):
        if str(TESTS / folder) not in sys.path:
            sys.path.insert(0, str(TESTS / folder))
    return importlib.import_module(name)
