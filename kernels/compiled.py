"""Finds what the compiler made of this folder's C files, where there was one when the package was built."""

import contextlib
import ctypes
import logging
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)


@cache
def _paths() -> list[Path]:
    return sorted(Path(__file__).parent.glob("_*.so"))


def load_all() -> None:
    """Load every library now. What a process has loaded, it finds again when it can open no file any more."""
    for path in _paths():
        with contextlib.suppress(OSError):  # `load_library` says so
            ctypes.CDLL(str(path))


def load_library(name: str, *, needs: str, keeps_gil: bool = False) -> ctypes.CDLL | None:
    """The library of that name, such as "_host"; None: it was not built, or not for this machine.

    Args:
        needs: a function of it. One without was built from an earlier version's sources, or has nothing for this kind
            of processor.
        keeps_gil: its functions take microseconds: less than it may take to get the GIL back from another thread.
    """
    kind = ctypes.PyDLL if keeps_gil else ctypes.CDLL
    for path in (path for path in _paths() if path.name.startswith(f"{name}.")):
        try:
            library = kind(str(path))
        except OSError as error:  # built for another machine, or without its libraries here
            logger.info("compiled kernels cannot be loaded: %s", error)
            continue
        if hasattr(library, needs):
            return library
        logger.info("compiled kernels are not used: %s has no %s", path, needs)
    return None
