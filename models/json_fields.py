"""Typed reads from the JSON files of a model directory. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdkv.errors import ModelError


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
            raise ModelError(f"{self.path}: field {name!r} must be a number, got {value!r}")
        return float(value)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise ModelError(f"{self.path}: field {name!r} must be a positive whole number, got {value!r}")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.path}: field {name!r} must be true or false, got {value!r}")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise ModelError(f"{self.path}: field {name!r} must be a token id or a list of them, got {value!r}")
        return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ModelError: the file is missing, unreadable or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path}: a JSON object was expected")
    return values
