"""Host, stand-in forward pass and defects for the random-schedule tests of the hand-off state machine."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
