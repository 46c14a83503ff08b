"""Models by their names on the Hugging Face hub: fetches the files that are read into the hub's own cache. No torch.

No code of a repository ever runs. Cache, mirrors, tokens and the offline mode are those of `huggingface_hub`
(HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

import dataclasses
import functools
import logging
import re
from pathlib import Path
from typing import TypeVar

from pdkv.config import ModelFiles
from pdkv.errors import ConfigError
from pdkv.models.config import load_model_config
from pdkv.models.weight_files import INDEX_NAME, SINGLE_NAME, read_index

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_SMALL = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja",
    "hf_quant_config.json", "adapter_config.json", "1_Pooling/config.json", INDEX_NAME,
]  # fmt: skip

Files = TypeVar("Files", bound=ModelFiles)


def with_local_model(files: Files) -> Files:
    """The same configuration with a local directory in place of a hub name such as ORG/NAME or ORG/NAME@REVISION.

    An existing local path takes precedence over a hub name.

    Raises:
        ConfigError: there is no such model, or it cannot be fetched.
        ModelError: the model is not supported; then no weights are fetched.
    """
    found = _NAME.fullmatch(str(files.model))
    if found is None or files.model.exists():
        return files
    return dataclasses.replace(files, model=_fetch(found["repo"], found["revision"], files.ignore_config_fields))


@functools.cache
def _fetch(repo: str, revision: str | None, ignored_fields: tuple[str, ...]) -> Path:
    """The snapshot's directory: first what says whether the model is computed, then its weights."""
    path = _download(repo, revision, _SMALL)
    logger.info("model %s at revision %s", repo, path.name)
    load_model_config(path, ignored_fields=ignored_fields)
    if not (_download(repo, path.name, [SINGLE_NAME]) / SINGLE_NAME).exists():
        index = read_index(path)
        _download(repo, path.name, ["*.safetensors"] if index is None else sorted(set(index.values())))
    return path


def _download(repo: str, revision: str | None, names: list[str]) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=names))
    except Exception as error:  # of the hub, of HTTP, of the file system
        what = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        where = f"{repo}@{revision}" if revision else repo
        raise ConfigError(f"model {where}: no such directory, and fetching it from the hub failed: {what}") from None


def hub_name(path: Path) -> str | None:
    """The name of the hub repository of which a directory is a snapshot; None: it is not a snapshot."""
    folder = path.parent.parent.name
    is_snapshot = path.parent.name == "snapshots" and folder.startswith("models--")
    return folder.removeprefix("models--").replace("--", "/", 1) if is_snapshot else None
