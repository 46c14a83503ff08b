"""Outputs with and without each proposer, over every kind of deployment, request and mishap: not one may differ."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # what harnesses share with tests
sys.path.append(str(Path(__file__).parents[3]))  # for benchmarks
