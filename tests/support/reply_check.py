"""Whether a reply is what its type says."""

from typing import Any

import msgspec
from pydantic import BaseModel


def check(value: Any, kind: Any) -> None:
    """The value is of that type, and has no field that the type lacks."""

    def check_nothing_is_lost(given: Any, known: Any) -> None:
        if isinstance(given, dict):
            assert set(given) <= set(known)
            for name, item in given.items():
                check_nothing_is_lost(item, known[name])
        elif isinstance(given, list):
            for ours, theirs in zip(given, known, strict=True):
                check_nothing_is_lost(ours, theirs)

    is_page = isinstance(kind, type) and issubclass(kind, BaseModel)
    known = kind.model_validate(value).model_dump() if is_page else msgspec.to_builtins(msgspec.convert(value, kind))
    check_nothing_is_lost(value, known)
