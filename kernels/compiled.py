"""Finds what the compiler made of this folder's C files, where there was one when the package was built."""

import ctypes
import logging
from pathlib import Path

logger = logging.getLogger(__name__)


def load_library(name: str) -> ctypes.CDLL | None:
    """The library of that name, such as "_host"; None: it was not built, or not for this machine."""
    for path in sorted(Path(__file__).parent.glob(f"{name}.*.so")):
        try:
            return ctypes.CDLL(str(path))
        except OSError as error:  # built for another machine, or without its libraries here
            logger.info("compiled kernels cannot be loaded: %s", error)
    return None
