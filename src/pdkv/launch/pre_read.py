"""Reads a model's weights into the page cache while the interpreters of its engines start. No torch."""

import contextlib
import fcntl
import os
import threading
from pathlib import Path

from pdkv.errors import PdkvError
from pdkv.host.memory_limits import available_memory
from pdkv.models.weight_files import WeightFiles

_PIECE_BYTES = 64 << 20


def pre_read(model: Path) -> threading.Thread:
    """Have the kernel begin to read all weights; returns the thread that asks it to, which needs no owner.

    Only one process of a host asks for each file. Weights that do not fit into the free memory are left out.
    """
    thread = threading.Thread(target=_read, args=(model,), name="pdkv-pre-read", daemon=True)
    thread.start()
    return thread


def _read(model: Path) -> None:
    with contextlib.suppress(PdkvError, OSError), WeightFiles(model) as weights:  # the engine will say what is wrong
        bound = available_memory()
        if bound is not None and sum(file.stamp.size for file in weights.files) > bound.usable_bytes:
            return
        for file in weights.files:
            fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
            for at in range(0, file.stamp.size, _PIECE_BYTES):
                os.posix_fadvise(file.fd, at, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
