"""The weights of a Hugging Face model directory: safetensors, in one file or sharded with an index."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from pdkv.errors import ModelError
from pdkv.model_config import read_json


class Checkpoint:
    """Tensors by their Hugging Face names, read on demand from mapped files; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open every weight file of `path`.

        Raises:
            ModelError: no weights, or a file that is missing or broken.
        """
        self.path = path
        self._files: dict[str, Any] = {}  # tensor name -> open file
        self._opened: list[Any] = []
        for file in _weight_files(path):
            try:
                handle: Any = safe_open(file, framework="pt")
                handle.__enter__()
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file}: cannot be read as safetensors: {error}") from None
            self._opened.append(handle)
            self._files.update(dict.fromkeys(handle.keys(), handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._opened:
            handle.__exit__(exc_type, exc, traceback)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def get(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor `name` of this whole shape, in the file's dtype, or a part of it: then only that is read.

        Raises:
            ModelError: it is missing, or has another shape than config.json implies.
        """
        if name not in self._files:
            raise ModelError(f"{self.path}: tensor {name!r} is missing")
        stored = self._files[name].get_slice(name)
        got = tuple(stored.get_shape())
        if got != shape:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {got}, config.json implies {shape}")
        tensor: torch.Tensor = stored[part] if part else self._files[name].get_tensor(name)
        return tensor


def _weight_files(path: Path) -> list[Path]:
    """The index's files where there is an index, else every *.safetensors file."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ModelError(f"{path}: no *.safetensors file")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: field 'weight_map' must map tensor names to files")
    files = [path / str(name) for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.exists():
            raise ModelError(f"{index} names {file.name}, which does not exist")
    return files
