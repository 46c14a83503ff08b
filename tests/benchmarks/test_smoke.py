"""Benchmarks that start a deployment run to their end with few requests."""

from pathlib import Path

from benchmarks import startup
from benchmarks.report import Context


def test_startup_measures_a_launch_of_the_embedded_model(tmp_path: Path) -> None:
    [claim] = startup.run(Context(tmp_path, None, quick=True))
    assert claim.figures["ready s"] > 0
    assert claim.ratio == claim.figures["ready s"] / claim.figures["import torch s"]
