"""Linux system calls that Python's standard library lacks."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, argument: ctypes.c_char_p | ctypes.c_ulong) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def set_process_name(name: str) -> None:
    """Name this process for `ps` and `top` (15 bytes are shown)."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, which can then wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have this process get a signal when the thread that forked it ends; SIGCONT lets a stopped one notice the end."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(by))
