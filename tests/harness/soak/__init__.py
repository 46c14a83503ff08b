"""Chaos under load: `make soak`. Everything that can go wrong does, and no answer may be wrong, no request may hang."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
sys.path.append(str(Path(__file__).parents[3]))  # for `tests`
