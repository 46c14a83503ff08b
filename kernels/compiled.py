"""Finds what the compiler made of this folder's C files, where there was one when the package was built."""

import ctypes
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def load_library(name: str, *, needs: str, keeps_gil: bool = False) -> ctypes.CDLL | None:
    """The library of that name, such as "_host"; None: it was not built, or not for this machine.

    Args:
        needs: a function of it. One without was built from an earlier version's sources, or has nothing for this kind
            of processor.
        keeps_gil: its functions take microseconds: less than it may take to get the GIL back from another thread.
    """
    kind = ctypes.PyDLL if keeps_gil else ctypes.CDLL
    for path in sorted(Path(__file__).parent.glob(f"{name}.*.so")):
        try:
            library = kind(str(path))
        except OSError as error:  # built for another machine, or without its libraries here
            logger.info("compiled kernels cannot be loaded: %s", error)
            continue
        if hasattr(library, needs):
            return library
        logger.info("compiled kernels are not used: %s has no %s", path, needs)
    return None
