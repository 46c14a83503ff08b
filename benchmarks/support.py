"""What tests and benchmarks share lies in tests/support."""

import importlib
import sys
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent.parent / "tests" / "support"


def support_module(name: str) -> Any:
    """A module of it."""
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))
    return importlib.import_module(name)
