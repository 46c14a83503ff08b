"""The weights of a Hugging Face model directory, read from files that are already open."""

import re
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from pdkv.errors import ModelError
from pdkv.models.weight_files import WeightFile, WeightFiles

_HARMLESS = re.compile(r"\.(rotary_emb\.inv_freq|(kv|[qkv]|attn|prob|prob_output)_scale)$")
"""What config.json says again, and scales of KV and attention in FP8, which another reader takes or nothing needs."""

_HARMLESS_QUANTIZED = re.compile(r"\.((input|output|act)_scale|input_scale_ub|input_zero_point|weight_shape)$")
"""Tensors next to weights that are multiplied with unquantized inputs."""

_ADDED = re.compile(r"[._](bias|zero_point)$")


class Checkpoint:
    """Tensors by their Hugging Face names, read on demand from mapped files; a context manager."""

    def __init__(self, weights: WeightFiles) -> None:
        """Map every file of `weights`, which stay open as long as this checkpoint.

        Raises:
            ModelError: a file is broken.
        """
        self.path = weights.path
        # AutoModel saves a model for embeddings, such as Qwen3-Embedding, without the head and this prefix.
        prefix = "" if any(name.startswith("model.") for name in weights.holders) else "model."
        self._holders = {prefix + name: holder for name, holder in weights.holders.items()}
        self._prefix = prefix
        self._mapped: dict[WeightFile, Any] = {}
        self._read: set[str] = set()
        for file in weights.files:
            try:
                handle: Any = safe_open(file.reopen_path, framework="pt")
                handle.__enter__()
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file.path}: cannot be read as safetensors: {error}") from None
            self._mapped[file] = handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._mapped.values():
            handle.__exit__(exc_type, exc, traceback)

    def __contains__(self, name: str) -> bool:
        return name in self._holders

    def check_all_read(self, *, quantized: bool, skipped: tuple[str, ...] = ()) -> None:
        """Refuse tensors that were not read, unless they change nothing or their names begin with one of `skipped`.

        Raises:
            ModelError: there are some; the message names one.
        """
        unread = [name for name in self._holders if name not in self._read and not _HARMLESS.search(name)]
        unread = [name for name in unread if not name.startswith(skipped)]
        unread = [name for name in unread if not (quantized and _HARMLESS_QUANTIZED.search(name))]
        # GPTQ's writers add a bias of zeros to each layer.
        if names := [name for name in unread if not _ADDED.search(name) or self.stored(name).float().any()]:
            raise ModelError(
                f"{self.path}: the model described by config.json does not use {len(names)} tensors, {names[0]!r} "
                "among them: its layers, biases, norms or quantization differ from the weights': tokens could be wrong"
            )

    def get(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] = ()) -> torch.Tensor:
        """The tensor `name`, which must have this whole shape, in the file's dtype; with `part`, only that part is
        read.

        The result may be a view of the mapped file and change with it: callers that keep it make a copy.

        Raises:
            ModelError: it is missing, or has another shape than config.json implies.
        """
        stored = self._handle(name).get_slice(name.removeprefix(self._prefix))
        got = tuple(stored.get_shape())
        if got != shape:
            raise ModelError(f"{self.path}: tensor {name!r} has shape {got}, config.json implies {shape}")
        tensor: torch.Tensor = stored[part] if part else self.stored(name)
        return tensor

    def stored(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, whatever its shape, as `get` returns it. Raises ModelError if it is missing."""
        tensor: torch.Tensor = self._handle(name).get_tensor(name.removeprefix(self._prefix))
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._holders:
            raise ModelError(f"{self.path}: tensor {name!r} is missing")
        self._read.add(name)
        return self._mapped[self._holders[name]]
