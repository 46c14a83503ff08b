"""Programs in the shapes of vLLM's examples for its server, over 1P1D of the embedded model without prefix caching."""

import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import Running, launches

from pdkv.config import DEFAULT_MODEL

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.fixture(scope="module")
def deployment() -> Iterator[Running]:
    flags = ["--prefill", "1", "--decode", "1", "--no-enable-prefix-caching", "--tool-parser", "hermes"]
    with launches(DEFAULT_MODEL) as launch:
        yield launch(*flags)


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_a_script_runs_against_the_server(script: Path, deployment: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_BASE", f"{deployment.url}/v1")
    runpy.run_path(str(script), run_name="__main__")


def test_nothing_is_found_in_caches_that_are_off(deployment: Running) -> None:
    model = deployment.get("/v1/models").json()["data"][0]["id"]
    replies = [deployment.complete([7] * 100, model=model, max_tokens=4).json() for _ in range(2)]
    assert replies[0]["choices"][0]["text"] == replies[1]["choices"][0]["text"]
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 0]
