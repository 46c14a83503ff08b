"""The simulator beside the deployments that it stands for."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3]))  # benchmarks, of which this uses parts
