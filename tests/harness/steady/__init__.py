"""The suite on a busy host, again and again: which tests fail while the product is right."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
