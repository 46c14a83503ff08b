"""Programs in the shapes of vLLM's own examples run, with no name or argument changed but the import."""

import runpy
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.processes
@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_script_runs_and_gets_the_answers_of_transformers(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(script), run_name="__main__")


def test_there_are_fifty() -> None:
    assert len(SCRIPTS) >= 50
