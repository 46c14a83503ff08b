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


def continue_when_orphaned() -> None:
    """Have this process continued, if it is stopped, when its parent ends, so that it can notice that itself."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def die_with_parent() -> None:
    """Have this process killed when the thread that forked it ends, even if it is stopped then."""
    _prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
