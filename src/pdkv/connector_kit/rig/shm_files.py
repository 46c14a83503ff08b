"""Finds named shared memory that no process uses, even while other processes create and unlink some."""

import contextlib
import os
from collections.abc import Set
from pathlib import Path

from pdkv.base.clock import MONOTONIC

SHM = Path("/dev/shm")
_POLL_S = 0.01


def shm_files() -> set[str]:
    """Names in /dev/shm."""
    return set(os.listdir(SHM))


def left_behind(before: Set[str], timeout_s: float) -> set[str]:
    """Names that have appeared since `before`, that no living process maps, and that stay for longer than
    `timeout_s`.
    """
    deadline = MONOTONIC.now() + timeout_s
    left = _unused(shm_files() - before)
    while left and MONOTONIC.now() < deadline:
        MONOTONIC.sleep(_POLL_S)  # unlinks are not announced
        left = _unused(left & shm_files())
    return left


def _unused(names: set[str]) -> set[str]:
    """Names that no process maps."""
    unused = set(names)
    for process in Path("/proc").iterdir() if unused else ():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                maps = (process / "maps").read_text()
                unused = {name for name in unused if f"{SHM}/{name}" not in maps}
    return unused
