"""Models by hub names: what is fetched, from where, and what is said; a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import model_directories
import pytest
from small_hub import COMMIT, SmallHub

from pdkv.config import EngineConfig
from pdkv.models.hub import hub_name, with_local_model

REPO = "ORG/Some-Model"
TOKEN = "hf_secretsecret"
PROGRAM = """
import logging, sys
from pathlib import Path
from pdkv.config import EngineConfig
from pdkv.errors import PdkvError
from pdkv.models.hub import with_local_model
logging.basicConfig(level="DEBUG", stream=sys.stderr)
try:
    print(with_local_model(EngineConfig(model=Path(sys.argv[1]))).model)
except PdkvError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with more files than a model needs."""
    path = tmp_path_factory.mktemp("repository")
    published = model_directories.directories()["Qwen2.5-7B-Instruct"]
    model_directories.write(path, published)
    (path / "chat_template.jinja").write_text(model_directories.CHATML)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(model_directories.TOOL_USE)
    for name in ("modeling_qwen2.py", "README.md", "pytorch_model.bin", "consolidated.safetensors", "tokenizer.model"):
        (path / name).write_text("raise SystemExit('code of a repository')")
    return path


def local(name: str, hub_url: str, home: Path, **environment: str) -> tuple[str, str]:
    """What is printed and logged by a process that wants a model."""
    own = {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], env={**os.environ, **own, **environment}, cwd=home,
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.strip(), done.stderr


def test_only_the_files_that_are_read_are_fetched_once_with_the_token_and_without_saying_it(
    files: Path, tmp_path: Path
) -> None:
    with SmallHub(REPO, files) as hub:
        path, log = local(REPO, hub.url, tmp_path)
        index = json.loads((files / "model.safetensors.index.json").read_text())
        wanted = {
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja", "model.safetensors.index.json", *index["weight_map"].values(),
        }  # fmt: skip
        assert hub.files_asked() == wanted
        found = {file.relative_to(path).as_posix() for file in Path(path).rglob("*") if file.is_file()}
        assert found == wanted
        assert {said for _, at, said in hub.asked if "/resolve/" in at} == {f"Bearer {TOKEN}"}
        assert f"model {REPO} at revision {COMMIT}" in log
        assert TOKEN not in log + path
        assert hub_name(Path(path)) == REPO
        hub.asked.clear()
        assert local(f"{REPO}@v1", hub.url, tmp_path)[0] == path
        assert not hub.files_asked()
    assert local(REPO, "http://127.0.0.1:1", tmp_path, HF_HUB_OFFLINE="1")[0] == path


def test_a_model_that_is_not_computed_is_refused_before_its_weights_are_fetched(files: Path, tmp_path: Path) -> None:
    other = shutil.copytree(files, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["GemmaForCausalLM"]}))
    with SmallHub(REPO, other) as hub:
        said, _ = local(REPO, hub.url, tmp_path)
        assert "architecture 'GemmaForCausalLM' is not supported" in said
        assert not [name for name in hub.files_asked() if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "ORG/Nothing",
            "model ORG/Nothing: no such directory, and fetching it from the hub failed: RepositoryNotFoundError",
        ),
        (
            f"{REPO}@v7",
            f"model {REPO}@v7: no such directory, and fetching it from the hub failed: RevisionNotFoundError",
        ),
        ("./ORG/Nothing", "ORG/Nothing"),
    ],
)
def test_a_name_that_the_hub_does_not_know_is_named(files: Path, tmp_path: Path, name: str, says: str) -> None:
    with SmallHub(REPO, files) as hub:
        said, log = local(name, hub.url, tmp_path)
        assert says in said
        assert TOKEN not in said + log


def test_what_is_a_path_here_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ORG" / "Some-Model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for model in (REPO, tmp_path / "x", "paced:h100"):
        config = EngineConfig(model=Path(model))
        assert with_local_model(config) is config
    assert hub_name(tmp_path) is None
