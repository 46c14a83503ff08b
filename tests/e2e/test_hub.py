"""A model by its name on a hub: what is served is that name, and the tokens are those of its directory."""

from pathlib import Path
from typing import Any

import pytest
from deployments import Launch, Running
from small_hub import COMMIT, SmallHub

REPO = "ORG/Some-Model"
PROMPTS = ["Where does a model come from?", "a", "b" * 200]


def answers(deployment: Running, model: str) -> list[Any]:
    """Token ids and text of each prompt, drawn, and of a conversation."""
    fields: dict[str, Any] = {"model": model, "max_tokens": 30, "seed": 3, "temperature": 1, "return_token_ids": True}
    found = [deployment.complete(prompt, **fields).json()["choices"][0] for prompt in PROMPTS]
    return [(choice["token_ids"], choice["text"]) for choice in found]


@pytest.mark.parametrize("name", [pytest.param(REPO, marks=pytest.mark.slow), f"{REPO}@v1"])
def test_a_hub_name_is_served_as_its_directory_is_also_offline(
    launch: Launch, served_model: Path, tmp_path: Path, name: str
) -> None:
    roles = ("--prefill", "1", "--decode", "1")
    directory = launch(*roles)
    expected = answers(directory, "served")
    assert directory.stop() == 0
    with SmallHub(REPO, served_model) as hub:
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret", "HF_HUB_DISABLE_XET": "1"}
        fetched = launch("--model", name, *roles, environment=own)
        assert answers(fetched, REPO) == expected
        assert [m["id"] for m in fetched.get("/v1/models").json()["data"]] == [REPO]
        assert fetched.complete("a", model="served").status_code == 404
        assert f"model {REPO} at revision {COMMIT}" in fetched.log
        assert "hf_secret" not in fetched.log
        assert hub.files_asked() >= {"config.json", "tokenizer.json", "model.safetensors"}
        assert fetched.stop() == 0
    offline = launch("--model", name, *roles, environment={**own, "HF_HUB_OFFLINE": "1"})
    assert answers(offline, REPO) == expected
