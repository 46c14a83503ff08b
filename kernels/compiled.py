"""Finds what the compiler made of this folder's C files, where there was one when the package was built."""

import contextlib
import ctypes
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@cache
def _paths() -> list[Path]:
    return sorted(Path(__file__).parent.glob("_*.so"))


def any_built() -> bool:
    """Whether there was a C compiler when the package was built."""
    return bool(_paths())


def load_all() -> None:
    """Load every library now. What a process has loaded, it finds again when it can open no file any more."""
    for path in _paths():
        with contextlib.suppress(OSError):  # `load_library` says so
            ctypes.CDLL(str(path))


Functions = Mapping[str, tuple[Any, Any]]
"""By name: what a function returns and what it takes, as types of ctypes."""

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64


def load_library(name: str, functions: Functions, *, keeps_gil: bool = False) -> ctypes.CDLL | None:
    """The library of that name, such as "_host"; None: it was not built, or not for this machine.

    Args:
        functions: those of it that will be called. A library without one was built from an earlier version's sources,
            or has nothing for this kind of processor.
        keeps_gil: its functions take microseconds: less than it may take to get the GIL back from another thread.
    """
    kind = ctypes.PyDLL if keeps_gil else ctypes.CDLL
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
