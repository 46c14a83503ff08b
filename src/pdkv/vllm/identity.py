"""Everything that KV inside vLLM depends on besides tokens: the weights, their treatment by vLLM, and adapters. Imports
no vLLM.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdkv.errors import ConfigError
from pdkv.models.identity import NEUTRAL_FIELDS, model_identity
from pdkv.models.weight_files import Stamp

_COMMIT_CHARS = 40
_ADAPTER_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".pt", ".pth"})
_DIGEST_BYTES = 16
_MAX_ADAPTERS = 4096
"""KV of further adapters is not shared. None is forgotten: its files may have changed since vLLM read them."""


def weights_identity(model_config: Any) -> str:
    """The identity of the files in a directory, or else the model's name on the hub and its commit.

    Raises:
        ConfigError: a hub's model without a known commit: a branch may have other weights tomorrow.
        ModelError: a file is missing, broken, or changed while it was read.
    """
    path = Path(model_config.model)
    if path.is_dir():
        return model_identity(path)
    known = (getattr(model_config.hf_config, "_commit_hash", None), model_config.revision)
    commit = next((name for name in known if name and len(name) == _COMMIT_CHARS), None)
    if commit is None:
        raise ConfigError(
            f"the weights of model {model_config.model!r} at revision {model_config.revision!r} cannot be identified: "
            "give its directory, or --revision with the hash of a commit"
        )
    return f"{model_config.model}@{commit}"


def computation_identity(vllm_config: Any) -> str:
    """A digest of vLLM's treatment of the weights: its resolved configuration (including overrides), dtype,
    quantization, and how weights are loaded.
    """
    model, load = vllm_config.model_config, vllm_config.load_config
    fields: Mapping[str, Any] = model.hf_config.to_dict()
    facts = {
        "config": {name: value for name, value in fields.items() if name not in NEUTRAL_FIELDS},
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": str(load.load_format),  # "dummy" means other weights
        "loader": str(load.model_loader_extra_config),
        "rope_length": _rope_length(model, fields),
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES, person=b"pdkv-vllm").hexdigest()


def _rope_length(model_config: Any, fields: Mapping[str, Any]) -> int | None:
    """--max-model-len, if keys depend on it: it decides between longrope's two lists of factors."""
    rope = json.dumps(fields.get("rope_parameters") or fields.get("rope_scaling"), default=str)
    return int(model_config.max_model_len) if '"longrope"' in rope else None


class _Adapter(NamedTuple):
    """A request's adapter when it was first named."""

    stamps: Mapping[str, Stamp]  # by file name
    identity: str


class AdapterIdentities:
    """Identities of LoRA adapters, from every byte of their files, read when a request first names them, as vLLM loads
    them.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Adapter] = {}

    def of(self, lora_request: Any) -> str | None:
        """The identity; empty for no adapter; None: unknown, since its files are not here, or have changed since vLLM
        loaded them, which it may do again at any time.
        """
        if lora_request is None:
            return ""
        key, path = (int(lora_request.lora_int_id), str(lora_request.lora_path)), Path(lora_request.lora_path)
        try:
            stamps = _stamps(path)
            known = self._known.get(key)
            if known is None and len(self._known) >= _MAX_ADAPTERS:
                return None
            reloads = known is not None and known.stamps != stamps and getattr(lora_request, "load_inplace", False)
            if known is None or reloads:
                known = _Adapter(stamps, _digest(path, stamps))
                if _stamps(path) != stamps:
                    return None  # written while it was read
                self._known[key] = known
        except OSError:
            return None
        return known.identity if stamps and stamps == known.stamps else None


def _stamps(path: Path) -> Mapping[str, Stamp]:
    """Time stamps of an adapter's files, by name."""
    files = sorted(file for file in path.iterdir() if file.suffix in _ADAPTER_SUFFIXES)
    return {file.name: Stamp.of(file.stat()) for file in files}


def _digest(path: Path, names: Iterable[str]) -> str:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"pdkv-lora")
    for name in names:
        with (path / name).open("rb") as file:
            content = hashlib.file_digest(file, "blake2b").digest()
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + content)
    return digest.hexdigest()
