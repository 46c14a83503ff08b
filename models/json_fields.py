"""Typed reads from the JSON files of a model directory. No torch."""

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdkv.errors import ModelError

_MAX_BYTES = 256 << 20
"""Largest size of one file: tokenizer.json of 260,000 tokens has 33 MB, the index of a thousand shards 10 MB."""

_MAX_JSON_BYTES = 32 << 20
_MAX_COUNT = (1 << 31) - 1
LFS_POINTER = b"version https://git-lfs"


class Fields:
    """Typed reads from a config.json; a missing or wrong field is a ModelError that names it."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.path}: field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.path}: field {name!r} must be a number, got {value!r:.80}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise ModelError(f"{self.path}: field {name!r} must be a finite number, got {value!r:.80}")
        return number

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0.0:
            raise ModelError(f"{self.path}: field {name!r} must be above 0, got {value!r}")
        return value

    def whole(self, name: str, default: int, most: int) -> int:
        value = self.number(name, default)
        if value != int(value) or not 0 <= value <= most:
            raise ModelError(f"{self.path}: field {name!r} must be a whole number from 0 to {most}, got {value!r}")
        return int(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or not 1 <= value <= _MAX_COUNT:
            raise ModelError(f"{self.path}: field {name!r} must be a positive whole number, got {value!r}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: field {name!r} must be true or false, got {value!r:.80}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(f"{self.path}: field {name!r} must be a token id or a list of them, got {value!r:.80}")
        return tuple(ids)


def read_bytes(path: Path, most: int = _MAX_BYTES) -> bytes:
    """A file's content.

    Raises:
        ModelError: it is missing, unreadable, not a regular file, larger than `most`, or a git-lfs pointer.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO is refused, not awaited
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path}: is not a regular file")
            if status.st_size > most:
                raise ModelError(f"{path}: at most {most >> 20} MiB were expected, got {status.st_size} bytes")
            content = file.read(most)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if content.startswith(LFS_POINTER):
        raise ModelError(f"{path}: is a git-lfs pointer instead of the file: fetch the file with `git lfs pull`")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file is missing, unreadable or holds no JSON object.
    """
    try:
        values = json.loads(read_bytes(path, _MAX_JSON_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: a JSON object was expected")
    return values
