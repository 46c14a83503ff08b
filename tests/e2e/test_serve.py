"""One launched 2P4D: ready line, topology, an answer, and what it says about itself."""

import pytest
from deployments import Launch, Running


@pytest.fixture(scope="module")
def deployment(module_launch: Launch) -> Running:
    return module_launch("--prefill", "2", "--decode", "4", "--served-model-name", "served")


def test_health_is_200(deployment: Running) -> None:
    assert deployment.get("/health").status_code == 200


def test_the_topology_names_every_engine_and_all_blocks_are_free(deployment: Running) -> None:
    engines = deployment.get("/topology").json()["engines"]
    names = [engine["name"] for engine in engines]
    assert sorted(names) == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0", "prefill-1"]
    assert len({engine["pid"] for engine in engines}) == 6
    for engine in engines:
        assert engine["role"] == engine["name"].split("-")[0]
        assert engine["state"] == "ready"
        assert (engine["waiting"], engine["running"]) == (0, 0)
        blocks = engine["blocks"]
        assert set(blocks) == {"total", "free", "cached", "active", "leased", "quarantined"}
        assert blocks["free"] + blocks["cached"] == blocks["total"] > 0


def test_a_completion_says_who_made_it_and_is_the_same_on_every_engine(deployment: Running) -> None:
    prompt = "The same prompt of some length, so that it has full blocks and a partial one."
    answers = [deployment.complete(prompt, max_tokens=12) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
    assert {answer.headers["x-pd-prefill-engine"].split("-")[0] for answer in answers} == {"prefill"}
    assert {answer.headers["x-pd-decode-engine"].split("-")[0] for answer in answers} == {"decode"}
    usage = answers[0].json()["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == 12
    assert answers[-1].json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_the_model_has_the_name_it_was_given(deployment: Running) -> None:
    assert [model["id"] for model in deployment.get("/v1/models").json()["data"]] == ["served"]
