"""Finds the libraries compiled from this folder's C files, if the package was built with a compiler.

Most libraries exist once for each level of x86-64 (`_host_v3`; on other machines `_host_base`). CPUID alone decides
which level is used: the highest that the processor has, or the one that PDKV_ISA names.
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
        ConfigError: PDKV_ISA names a level that this host lacks.
    """
    named = os.environ.get(ISA)
    if named and named not in levels():
        raise ConfigError(f"{ISA}={named}: this host has {', '.join(levels()) or 'no compiled kernels'}")
    return named or (levels()[-1] if levels() else None)


def load_all() -> None:
    """Load every library now, so that it is still available when the process can open no more files."""
    for name in ("_block_keys", "_codec", "_host", "_linear", "_sampler"):
        load_library(name, {})


Functions = Mapping[str, tuple[Any, Any]]
"""The result and argument types of each function by name, as ctypes types."""

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


def load_library(name: str, functions: Functions, *, keeps_gil: bool = False) -> ctypes.CDLL | None:
    """The library of that name, such as "_host"; None: it was not built, or not for this machine.

    Args:
        functions: the functions that will be called. A library that lacks one was built from an earlier version's
            sources.
        keeps_gil: hold the GIL during calls: they take microseconds, less than getting the GIL back from another thread
            may take.
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
