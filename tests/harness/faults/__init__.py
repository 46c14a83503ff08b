"""Faults under load: `python -m faults` in tests/harness, and tests/e2e/test_faults.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
