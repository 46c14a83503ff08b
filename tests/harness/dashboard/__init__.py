"""The live page over fleets that compute nothing: pictures, first paint, and what open pages cost the router."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
