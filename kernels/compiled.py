"""Finds what the compiler made of this folder's C files, where there was one when the package was built.

Most libraries are there once for each level of x86-64 (`_host_v3`; on other machines `_host_base`). CPUID alone says
which of them are used: the highest that the processor has, or the one that PDKV_ISA names.
"""

import ctypes
import logging
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from pdkv.errors import ConfigError

logger = logging.getLogger(__name__)

ISA: Final = "PDKV_ISA"
_LEVELS = ("v2", "v3", "v4", "v4_bf16") if platform.machine() == "x86_64" else ("base",)

_UNLEVELLED: Final = "_block_keys"
"""The one library that is compiled for any processor of the kind."""


@cache
def _paths() -> list[Path]:
    return sorted(Path(__file__).parent.glob("_*.so"))


@cache
def levels() -> tuple[str, ...]:
    """The levels that this processor has, the highest last; none without compiled kernels."""
    library = _load(_UNLEVELLED, {"pdkv_num_levels": (NUMBER, ())}, ctypes.CDLL)
    return () if library is None else _LEVELS[: library.pdkv_num_levels()]


@cache
def isa() -> str | None:
    """The level that is used; None: there is none.

    Raises:
        ConfigError: PDKV_ISA names one that this host has not.
    """
    named = os.environ.get(ISA)
    if named and named not in levels():
        raise ConfigError(f"{ISA}={named}: this host has {', '.join(levels()) or 'no compiled kernels'}")
    return named or (levels()[-1] if levels() else None)


def load_all() -> None:
    """Load every library now. What a process has loaded, it finds again when it can open no file any more."""
    for name in ("_block_keys", "_codec", "_host", "_linear", "_sampler"):
        load_library(name, {})


Functions = Mapping[str, tuple[Any, Any]]
"""By name: what a function returns and what it takes, as types of ctypes."""

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


def load_library(name: str, functions: Functions, *, keeps_gil: bool = False) -> ctypes.CDLL | None:
    """The library of that name, such as "_host"; None: it was not built, or not for this machine.

    Args:
        functions: those of it that will be called. A library without one was built from an earlier version's sources.
        keeps_gil: its functions take microseconds: less than it may take to get the GIL back from another thread.
    """
    kind = ctypes.PyDLL if keeps_gil else ctypes.CDLL
    level = isa()
    usable = _LEVELS[: _LEVELS.index(level) + 1] if level else ()
    for each in [name] if name == _UNLEVELLED else [f"{name}_{level}" for level in reversed(usable)]:
        if (library := _load(each, functions, kind)) is not None:
            return library
    return None


def _load(name: str, functions: Functions, kind: type[ctypes.CDLL]) -> ctypes.CDLL | None:
    for path in (path for path in _paths() if path.name.startswith(f"{name}.")):
        try:
            library = kind(str(path))
        except OSError as error:  # built for another machine, or without its libraries here
            logger.info("compiled kernels cannot be loaded: %s", error)
            continue
        if missing := [function for function in functions if not hasattr(library, function)]:
            logger.info("compiled kernels are not used: %s has no %s", path, missing[0])
            continue
        for function, (result, arguments) in functions.items():
            getattr(library, function).restype, getattr(library, function).argtypes = result, arguments
        return library
    return None
